"""The papers' figures and tables that no other command shows, in their simplest form: one table
each.

    python -m benchmarks.figures "cacheblend 7" "cacheblend 15c" [--model smollm2]
    python -m benchmarks.figures "cachedattention 4" --trace ShareGPT_V3.json \\
        --profile HOME/kv/profile.json
    python -m benchmarks.figures --list

Each says whether it is measured, simulated or computed. Measured is a model over the articles of
`examples/corpus`, or over published questions where they are (`benchmarks.sets`). Simulated is a
generated load or a trace (docs/research/policies.md) with times of a profile or of a formula.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.figure_bench import Bench, Figure, NotHereError
from benchmarks.figures_cacheblend import FIGURES as CACHEBLEND
from benchmarks.figures_conversations import FIGURES as CONVERSATIONS
from benchmarks.figures_kcache import FIGURES as KCACHE

FIGURES: dict[str, Figure] = {**CACHEBLEND, **CONVERSATIONS, **KCACHE}


def main() -> None:
    """Print the tables, and write the JSON."""
    parser = report.parser(__doc__, quick="three articles, few points", threads=1)
    parser.add_argument("figures", nargs="*", help="paper and figure, in quotes; none: all")
    parser.add_argument("--list", action="store_true", help="print their names")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trace", default="sharegpt-like", help="of the simulator")
    parser.add_argument("--profile", type=Path, help="profile.json of a store; none: measured")
    options = parser.parse_args()
    if unknown := [name for name in options.figures if name not in FIGURES]:
        parser.error(f"no figure is named {unknown[0]!r}: see --list")
    wanted = {name: FIGURES[name] for name in options.figures or FIGURES}
    if options.list:
        for name, figure in wanted.items():
            print(f"{name} ({figure.kind}): {figure.about}")
        return
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    results = {name: _made(name, figure, bench) for name, figure in wanted.items()}
    print("written:", report.save("figures", results))


def _made(name: str, figure: Figure, bench: Bench) -> dict[str, Any]:
    """Print one figure; what is saved of it."""
    began = time.perf_counter()
    try:
        rows = list(figure.make(bench))
    except NotHereError as error:
        print(f"\n{name}: skipped, {error}")
        return {"skipped": str(error)}
    print(f"\n{name} ({time.perf_counter() - began:.0f} s; {figure.kind}). {figure.about}")
    if figure.paper:
        print(f"The paper: {figure.paper}.")
    report.table(figure.headings.split(), rows)
    return {"kind": figure.kind, "headings": figure.headings.split(), "rows": rows}


if __name__ == "__main__":
    main()
