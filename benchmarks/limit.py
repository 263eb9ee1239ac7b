"""The first token of a warm prompt over its limit, full / (share of rows computed): what attention
of scattered rows, placing and small products cost beyond the rows themselves.

    python -m benchmarks.limit [--quick] [--shapes smollm2 qwen2.5-0.5b] [--lengths 900 1800 4000]
    python -m benchmarks.limit --shapes smollm2 --lengths 1800 --ratios .15 --profile

Full recompute is our own, in the same run; actions alternate, and the table has medians and the
best times. The share of rows is what the engine reports: rows times layers, extra passes counted.
"smollm2" is the real model, other shapes have random weights. Entries are random (neither changes
time), in int8 in memory, in chunks of 128 tokens, and every one of them is fused. `--profile` also
prints what torch's operations took in one run of each method.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from benchmarks.ttft_world import MODELS, OUR_FULL, QUESTION_TOKENS, REAL, Method, World, model_of

CHUNK_TOKENS = 128


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    shape: str
    tokens: int  # of the prompt
    method: str
    ratio: float
    share: float  # of a full prefill's rows, in all layers
    median_s: float
    best_s: float
    of_limit: float  # the speedup over full recompute, over 1 / share
    best_of_limit: float  # likewise of the best times


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    rows = []
    for shape in options.shapes:
        model = model_of(shape, "cpu", max(options.lengths) + CHUNK_TOKENS)
        for tokens in options.lengths:
            rows += _measured(model, shape, tokens, options)
    print(f"bf16, {report.machine()['cpu']}, {options.threads} threads")
    report.table(
        ["shape", "tokens", "method", "ratio", "rows", "ms", "best", "of limit", "best of limit"],
        [
            [
                *(row.shape, row.tokens, row.method, f"{row.ratio:.2f}", f"{row.share:.3f}"),
                *(f"{1e3 * seconds:.0f}" for seconds in (row.median_s, row.best_s)),
                *(f"{share:.2f}" for share in (row.of_limit, row.best_of_limit)),
            ]
            for row in rows
        ],
    )
    print(
        "written:",
        report.save(f"limit{options.tag and f'-{options.tag}'}", [asdict(row) for row in rows]),
    )


def _measured(model: Any, shape: str, tokens: int, options: argparse.Namespace) -> list[Row]:
    methods = [Method(OUR_FULL), *(Method("attention", ratio) for ratio in options.ratios)]
    chunks = round((tokens - QUESTION_TOKENS) / CHUNK_TOKENS)
    with (
        tempfile.TemporaryDirectory() as directory,
        World(model, chunks, CHUNK_TOKENS, "memory", directory, codec="int8") as world,
    ):
        actions = {method: world.action(method) for method in methods}
        shares = {method: action().reuse.compute for method, action in actions.items()}
        clock = time.thread_time if options.processor_time else time.perf_counter
        times = _alternated(actions, options.runs, clock)
        if options.profile:
            _print_profiles(actions)
        median = {method: statistics.median(taken) for method, taken in times.items()}
        best = {method: min(taken) for method, taken in times.items()}
        full = methods[0]
        return [
            Row(
                *(shape, world.length, method.name, method.ratio, shares[method]),
                *(median[method], best[method]),
                median[full] / median[method] * shares[method],
                best[full] / best[method] * shares[method],
            )
            for method in methods
        ]


def _alternated(
    actions: Mapping[Method, Callable[[], Any]], runs: int, clock: Callable[[], float]
) -> dict[Method, list[float]]:
    """The times of each action, which was called before."""
    times: dict[Method, list[float]] = {method: [] for method in actions}
    for _ in range(runs):
        for method, action in actions.items():
            began = clock()
            action()
            times[method].append(clock() - began)
    return times


def _print_profiles(actions: Mapping[Method, Callable[[], Any]]) -> None:
    """The operations of torch that took longest, each without those that it calls."""
    for method, action in actions.items():
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            action()
        print(f"\n{method.name}, ratio {method.ratio:.2f}")
        print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a tiny shape", threads=1, runs=5)
    parser.add_argument("--profile", action="store_true", help="print what operations took")
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=[REAL, "qwen2.5-0.5b"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[900, 1800, 4000])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.15])
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of the thread that computes, where other programs run; reading is on other threads",
    )
    parser.add_argument("--tag", default="", help="added to the results' name")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.lengths, options.runs = ["tiny"], [400], 2
        options.tag = "quick"
    return options


if __name__ == "__main__":
    main()
