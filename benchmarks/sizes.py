"""Does selective recompute hold as models grow? The gap closed by each selector, on readers of several sizes.

    python -m training.train --workers 1 --compile --steps 2000 --seed 5 --hidden 320 --layers 12 --out runs/large
    python -m training.scores --reader runs/large/export --worlds 300 --steps 600 --out runs/scores
    cp runs/scores runs/large/export/ragkv-scores.safetensors
    python -m benchmarks.sizes reader runs/large/export          # as many folders as there are readers

Each reader answers the same questions on the same held-out worlds (`benchmarks/quality.py`; `--level 5` for some 2,000
tokens in 15 to 17 chunks). The ratios cost 5, 10 and 15 % of the row-layers of the whole context, whose first chunk is
exact; "hkvd" costs a layer more than its ratio, so a deeper reader pays less. "hkvd, compute" pays for that layer
from its share, which few layers cannot do at a low one. Intervals are 95 % bootstraps over worlds.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks import quality, report
from ragkv.model.loading import READER

SELECTORS = ("hkvd", "hkvd-gradual", "variance", "sensitivity")
RATIOS = ("0.06", "0.12", "0.18")


def main() -> None:
    options = _options()
    rows = []
    for folder in options.readers:
        found = measured(folder, options)
        rows.append(found)
        name = f"{found['parameters'] / 1e6:.2f} M parameters, {found['layers']} layers ({folder})"
        print(f"\n{name}: {found['questions']} questions on {found['contexts']} worlds", flush=True)
        _print(found["methods"])
    name = f"sizes{'-quick' if options.quick else ''}{options.tag}"
    print("written:", report.save(name, rows))
    _plot(rows, report.RESULTS / f"{name}.png")


def measured(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one reader answers with each method, and its shape."""
    own = quality.options_of(["--model", folder, "--ratios", *RATIOS, "--selectors", *SELECTORS, "--triangle"])
    for name in ("worlds", "each", "level", "seed", "workers", "threads"):
        setattr(own, name, getattr(options, name))
    own.map_rerank = False
    outcomes, _ = quality.shared_out(own)
    guess = [question.guess for context in quality.contexts_of(own) for question in context.questions]
    where = Path(READER if folder == "reader" else folder)
    config = json.loads((where / "config.json").read_text())
    with safe_open(str(where / "model.safetensors"), framework="pt") as weights:
        parameters = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118, not a dict
    shape = {"parameters": parameters, "layers": config["num_hidden_layers"], "hidden": config["hidden_size"]}
    return quality.summarized(outcomes, statistics.mean(guess)) | shape | {"reader": folder}


def _print(methods: dict[str, Any]) -> None:
    rows = []
    for name, row in methods.items():
        low, high = row["gap_closed_95"] or (float("nan"), float("nan"))
        closed = f"{row['gap_closed']:.2f} ({low:.2f} to {high:.2f})"
        rows.append((name, f"{row['exact']:.3f}", f"{row['kl']:.3f}", closed, f"{row['context_compute']:.3f}"))
    report.table(("method", "EM", "KL", "gap closed", "compute, of the context"), rows)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the gap closed against the number of parameters; without matplotlib print a sentence."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(RATIOS), figsize=(11, 3.6), sharey=True)
    for panel, ratio, share in zip(panels, RATIOS, ("5 %", "10 %", "15 %"), strict=True):
        for selector in SELECTORS:
            found = [(row["parameters"] / 1e6, row["methods"][f"{selector} {ratio}"]) for row in rows]
            found = [(size, of) for size, of in found if of["gap_closed_95"]]  # no gap, no share of it
            sizes, closed = [size for size, _ in found], [of["gap_closed"] for _, of in found]
            errors = [[abs(of["gap_closed"] - of["gap_closed_95"][end]) for _, of in found] for end in (0, 1)]
            panel.errorbar(sizes, closed, errors, marker="o", capsize=3, linestyle="none", label=selector)
        panel.set_xscale("log")
        panel.set_title(f"ratio {ratio}: {share} of the context")
        panel.set_xlabel("parameters, millions")
    panels[0].set_ylabel("share of the gap closed")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    print("plot:", path)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="few questions", threads=1)
    parser.add_argument("readers", nargs="+", help='folders of readers, or "reader", the bundled one')
    parser.add_argument("--worlds", type=int, default=60)
    parser.add_argument("--each", type=int, default=100, help="maximum number of questions per type")
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--seed", type=int, default=61, help="of the worlds")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--tag", default="", help="added to the results' name")
    options = parser.parse_args()
    if options.quick:
        options.worlds, options.each = 6, 5
    return options


if __name__ == "__main__":
    main()
