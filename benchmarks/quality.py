"""Answer quality of fusion: methods x recompute ratio x question type, compared with full prefill in the same run.

    python -m benchmarks.quality                                      # the bundled reader on held-out worlds
    python -m benchmarks.quality --quick                              # under a minute
    python -m benchmarks.quality --model PATH --data FILE             # any model; worlds JSONL, MuSiQue, LongBench

EM, F1, ROUGE-L; PGR = (method - no context) / (full prefill - no context); gap closed = (method - full reuse) / (full
prefill - full reuse); KL of the answer's first token; attention deviation. "compute" is row-layers beyond full reuse
over those of recomputing all fused tokens, with extra passes counted: `sensitivity` at 15 % costs .15, HKVD also a
layer, `attention` also the question. "compute .15" in a name means that the ratio is lowered until all of this
costs .15. "context" is the same over the row-layers of the whole context, of which the first chunk is exact.
With `--apart` a chunk is scored behind chunks of other contexts, as where another document explains it.
Intervals are 95 % bootstraps over contexts, differences are paired. This measures how one small model reads prose like
its training data; `benchmarks/fidelity.py` uses a model that others trained.
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks import quality_data, report
from benchmarks.quality_data import Context
from benchmarks.quality_run import Asker, Method, Outcome
from benchmarks.rows import draws, interval
from ragkv import Engine, EngineConfig, FusionConfig

SELECTORS = ("attention", "hkvd", "hkvd-gradual", "sensitivity", "first-k", "random", "oracle")
RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)

Outcomes = dict[str, list[Outcome]]


def main() -> None:
    options = options_of()
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    contexts = contexts_of(options)
    outcomes = joined(report.over_processes(_part, options))
    guess = [question.guess for context in contexts for question in context.questions]
    results = summarized(outcomes, statistics.mean(guess))
    _print(results)
    kind = "".join(f"-{name}" for name in ("apart", "variance", "quick") if getattr(options, name))
    name = f"quality-{Path(options.model).name}{kind}{options.tag}"
    print("written:", report.save(name, results), f"{time.perf_counter() - began:.0f} s")


def _engine(options: argparse.Namespace) -> Engine:
    fusion = FusionConfig(sensitivity_prefixes=options.prefixes, learned_scores=not options.variance)
    return Engine.from_pretrained(options.model, EngineConfig(dtype=options.dtype, fusion=fusion))


def joined(parts: Iterable[Outcomes]) -> Outcomes:
    """The outcomes of several processes."""
    outcomes: Outcomes = defaultdict(list)
    for part in parts:
        for name, found in part.items():
            outcomes[name] += found
    return outcomes


def _part(options: argparse.Namespace, part: int) -> Outcomes:
    """One process's share of the contexts."""
    torch.set_num_threads(options.threads)
    contexts = dict(list(enumerate(contexts_of(options)))[part :: options.workers])
    with _engine(options) as engine:
        if options.apart:
            _encode_apart(engine, contexts_of(options))
        return measured(engine, contexts, _methods(options, engine.model.adapter.layer_count), options.map_rerank)


def _encode_apart(engine: Engine, contexts: Sequence[Context]) -> None:
    """Encode and score the chunks of all contexts in one shuffled order: a chunk's neighbours are of other contexts."""
    chunks = [engine.chunk(text) for text in dict.fromkeys(text for context in contexts for text in context.chunks)]
    Random(len(chunks)).shuffle(chunks)
    engine.warm(chunks)


def measured(engine: Engine, contexts: Mapping[int, Context], methods: Sequence[Method], map_rerank: bool) -> Outcomes:
    """Every question of numbered contexts with every method."""
    outcomes: Outcomes = defaultdict(list)
    for number, context in contexts.items():
        asker = Asker(engine, context, number)
        outcomes["no context"] += asker.no_context()
        for method in methods:
            outcomes[method.name] += asker.outcomes(method)
        if map_rerank:
            outcomes["map-rerank"] += asker.map_rerank()
    return outcomes


def summarized(outcomes: Outcomes, guess: float) -> dict[str, Any]:
    """Means, intervals, gaps closed and paired differences."""
    contexts = np.array([outcome.context for outcome in outcomes["full prefill"]])
    _, contexts = np.unique(contexts, return_inverse=True)
    drawn_contexts = draws(int(contexts.max()) + 1)  # (resamples, contexts)
    sums = {name: np.bincount(contexts, [o.exact for o in found]) for name, found in outcomes.items()}
    count = np.bincount(contexts)
    drawn = {name: drawn_contexts @ total / (drawn_contexts @ count) for name, total in sums.items()}
    rows = {}
    for name, found in outcomes.items():
        means = {
            field.name: _mean(getattr(outcome, field.name) for outcome in found)
            for field in dataclasses.fields(Outcome)
            if field.type is float
        }
        rows[name] = means | {
            "exact_95": interval(drawn[name]),
            "gap_closed": _share(sums, name, "full reuse", sum),
            "gap_closed_95": interval(_share(drawn, name, "full reuse")),
            "pgr": _share(sums, name, "no context", sum),
            "minus_hkvd_95": _against_hkvd(drawn, name),
            "types": _by_type(found),
        }
    return {"guess": guess, "questions": len(contexts), "contexts": int(contexts.max()) + 1, "methods": rows}


def _mean(values: Iterable[float]) -> float | None:
    """The mean of the measured values, `None` if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else None


def _share(values: dict[str, Any], name: str, floor: str, total: Callable[[Any], Any] = lambda value: value) -> Any:
    """(method - floor) / (full prefill - floor)."""
    low, high = total(values[floor]), total(values["full prefill"])
    gap = np.where(np.abs(high - low) < 1e-12, np.nan, high - low)
    share = (total(values[name]) - low) / gap
    return float(share) if np.ndim(share) == 0 else share


def _against_hkvd(drawn: dict[str, np.ndarray], name: str) -> list[float]:
    """The paired interval of EM minus HKVD's at the same ratio."""
    rival = f"hkvd {name.rpartition(' ')[2]}"
    return interval(drawn[name] - drawn[rival]) if rival in drawn and name != rival else []


def _by_type(found: Iterable[Outcome]) -> dict[str, float]:
    types: dict[str, list[float]] = defaultdict(list)
    for outcome in found:
        types[outcome.type].append(outcome.exact)
    return {kind: statistics.fmean(values) for kind, values in sorted(types.items())}


def _methods(options: argparse.Namespace, layers: int) -> list[Method]:
    methods = [
        Method("full prefill", reuse="none"),
        Method("exact-prefix reuse", reuse="prefix"),
        Method("full reuse", 0.0, "none"),
    ]
    for ratio in options.ratios:
        methods += [Method(f"{name} {ratio}", ratio, name) for name in options.selectors]
        for name in {"hkvd", "sensitivity"} & set(options.selectors) if ratio in options.triangle else ():
            methods.append(Method(f"{name}, triangle {ratio}", ratio, name, triangle=True))
        if "hkvd" in options.selectors and ratio * layers > 1:  # the budget covers its check layer
            methods.append(Method(f"hkvd, compute {ratio}", (ratio * layers - 1) / (layers - 1), "hkvd"))
        if "attention" in options.selectors:
            methods.append(Method(f"attention, compute {ratio}", ratio, "attention", all_in=True))
    return methods


def contexts_of(options: argparse.Namespace) -> list[Context]:
    if options.data is not None:
        contexts = quality_data.read(options.data)
    else:
        contexts = quality_data.worlds(options.worlds, options.seed, options.level)
    contexts = quality_data.balanced(contexts, options.each)
    return quality_data.limited(contexts, options.questions)


def _print(results: dict[str, Any]) -> None:
    methods = results["methods"]
    types = list(methods["full prefill"]["types"])
    print(f"{results['questions']} questions on {results['contexts']} contexts, guess floor {results['guess']:.3f}\n")
    measured_heads = ("EM", "95 %", "F1", "ROUGE-L", "KL", "attn dev", "PGR", "gap closed", "compute", "context")
    rows = []
    for name, row in methods.items():
        low_high = "-".join(f"{v:.3f}" for v in row["exact_95"])
        closed = f"{row['gap_closed']:.2f}"
        rows.append(
            (
                name, *(f"{row['types'][kind]:.2f}" for kind in types), row["exact"], low_high, row["f1"], row["rouge"],
                row["kl"], row["attention_deviation"], f"{row['pgr']:.2f}", closed, row["compute"],
                row["context_compute"],
            )
        )  # fmt: skip
    report.table(("method", *types, *measured_heads), rows)
    print("\npaired differences of EM to hkvd at the same ratio, 95 %")
    for name, row in methods.items():
        if row["minus_hkvd_95"]:
            print(f"  {name:28s} {row['minus_hkvd_95']}  gap closed {row['gap_closed_95']}")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `arguments`."""
    parser = report.parser(__doc__, quick="few questions and methods, under a minute", threads=1)
    parser.add_argument("--model", default="reader", help='a model folder, or "reader", the bundled one')
    parser.add_argument("--data", type=Path, help="questions: worlds JSONL, MuSiQue or LongBench; default: new worlds")
    parser.add_argument("--worlds", type=int, default=150, help="worlds to make without --data")
    parser.add_argument("--seed", type=int, default=0, help="of those worlds")
    parser.add_argument("--level", type=int, default=3, help="of those worlds: 3 as trained, 4 long contexts")
    parser.add_argument("--questions", type=int, help="maximum number of questions")
    parser.add_argument("--each", type=int, default=10**9, help="maximum number of questions per type")
    parser.add_argument("--selectors", nargs="+", default=list(SELECTORS), choices=SELECTORS)
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--triangle", nargs="*", type=float, default=[0.15], help="ratios of the wrong mask")
    parser.add_argument("--prefixes", type=int, default=2, help="k of sensitivity")
    parser.add_argument("--variance", action="store_true", help="sensitivity by the variance, not by learned scores")
    parser.add_argument("--apart", action="store_true", help="encode the chunks of all contexts in one shuffled order")
    parser.add_argument("--map-rerank", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tag", default="", help="added to the results' name")
    parser.add_argument("--dtype", default="float32", help="float32 avoids rounding effects")
    parser.add_argument("--workers", type=int, default=1, help="processes; times are unreliable with more than one")
    options = parser.parse_args(arguments)
    if options.quick:
        options.worlds, options.each = 8, 4
        options.ratios, options.selectors = [0.15], ["hkvd", "sensitivity", "random"]
    return options


if __name__ == "__main__":
    main()
