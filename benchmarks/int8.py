"""What int8 weights do to answers: exact match of the bundled reader, and KL of a model that others trained.

    python -m benchmarks.int8 [--worlds 12] [--model PATH]

The reader answers the same questions in float32 and with int8 weights; each is also compared with its own full prefill
(KL of the answer's first token). `--model` is a folder with a model of `fidelity.py`, such as stories260K: then the
next tokens of a full prefill with int8 weights are compared with those in float32.
"""

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import fidelity, quality_data, report
from benchmarks.quality_run import Asker, Method
from ragkv import Engine, EngineConfig
from ragkv.model.int8 import round_weights

METHODS = (
    Method("full prefill", reuse="none"),
    Method("full reuse", 0.0, "hkvd"),
    *(Method(f"sensitivity {ratio}", ratio, "sensitivity") for ratio in (0.05, 0.15)),
)
RATIOS = (0.0, 0.05, 0.15, 1.0)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = _answers(options.worlds)
    report.table(("weights", "method", "questions", "EM", "KL"), rows)
    found = {"reader": [list(row) for row in rows]}
    if options.model is not None:
        more = _next_tokens(options.model, options.texts)
        report.table(("weights", "ratio of sensitivity", "KL to float32's full prefill"), more)
        found["next tokens"] = [list(row) for row in more]
    print("written:", report.save("int8", found))


def _answers(worlds: int) -> list[tuple[str, str, int, float, float]]:
    contexts, rows = quality_data.worlds(worlds, seed=0, level=3), []
    for weights in ("plain", "int8"):
        outcomes: dict[str, list[Any]] = {method.name: [] for method in METHODS}
        with Engine.from_pretrained("reader", EngineConfig(dtype="float32", weights=weights)) as engine:
            for number, context in enumerate(contexts):
                asker = Asker(engine, context, number)
                for method in METHODS:
                    outcomes[method.name] += asker.outcomes(method)
        for name, all_of in outcomes.items():
            exact, kl = (statistics.mean(values) for values in zip(*((o.exact, o.kl) for o in all_of), strict=True))
            rows.append((weights, name, len(all_of), exact, kl))
    return rows


def _next_tokens(folder: Path, count: int) -> list[tuple[str, float, float]]:
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = copy.deepcopy(plain)
    round_weights(rounded)
    texts, rows, wanted = fidelity.sampled(plain, count, chunks=6, tokens=64, after=16), [], []
    for weights, model in (("plain", plain), ("int8", rounded)):
        with Engine(model) as engine:
            for text in texts:
                engine.warm(text.chunks)
            if not wanted:
                wanted = [fidelity.next_tokens(engine, text, "none", 0.0, reuse="none")[0] for text in texts]
            for ratio in RATIOS:
                found = [fidelity.next_tokens(engine, text, "sensitivity", ratio)[0] for text in texts]
                kl = statistics.mean(fidelity.divergence(one, other) for one, other in zip(wanted, found, strict=True))
                rows.append((weights, ratio, kl))
    return rows


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="two worlds", threads=1)
    parser.add_argument("--worlds", type=int, default=12)
    parser.add_argument("--model", type=Path, help="a model folder for the KL of next tokens")
    parser.add_argument("--texts", type=int, default=20)
    options = parser.parse_args()
    if options.quick:
        options.worlds = 2
    return options


if __name__ == "__main__":
    main()
