"""Requests from several threads: the cost of the OpenMP thread pools they leave behind (`ragkv/runtime/openmp.py`).

    python -m benchmarks.openmp [--quick] [--shape qwen2.5-0.5b]

Threads of a server ask one after another, never two at the same time, for a fused prompt and a short answer. Rounds
alternate: pools kept, as torch leaves them, and released, as the engine does. Every round has new threads. Medians;
the first round is not measured. Random weights, which do not change time.
"""

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import report
from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.model.shapes import SHAPES, random_model
from ragkv.runtime import openmp

QUESTION_TOKENS = 32


def main() -> None:
    """Measure and print."""
    options = _options()
    torch.set_num_threads(options.threads)
    model = random_model(options.shape)
    if openmp._gnu_openmp() is None:
        print("torch does not compute with GNU OpenMP here: both ways are the same.")
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(3, model.config.vocab_size, (count,), generator=generator).tolist()
        for count in (QUESTION_TOKENS, *[options.tokens] * options.chunks)
    ]
    config = EngineConfig(store=StoreConfig(memory_bytes=4 << 30), fusion=FusionConfig(sensitivity_prefixes=0))
    times: dict[str, list[tuple[float, float]]] = {"kept": [], "released": []}
    with Engine(model, config=config) as engine:
        engine.warm(ids[1:])
        for number in range(options.runs + 1):
            for way, measured in times.items():
                with _way(way):
                    found = _ask(engine, ids[0], ids[1:], options)
                if number:
                    measured.extend(found)
    medians = {
        way: [statistics.median(values) for values in zip(*measured, strict=True)] for way, measured in times.items()
    }
    rows = [(way, f"{first * 1e3:.1f}", f"{step * 1e3:.2f}") for way, (first, step) in medians.items()]
    gains = [kept / released for kept, released in zip(medians["kept"], medians["released"], strict=True)]
    print(f"{options.shape} (random weights), {options.chunks} x {options.tokens} + {QUESTION_TOKENS} tokens, ratio "
          f"{options.ratio}, {options.askers} request threads, {options.threads} torch threads")  # fmt: skip
    report.table(("thread pools", "TTFT ms", "ms per token"), [*rows, ("gain", *(f"{gain:.2f}x" for gain in gains))])
    print("written:", report.save(f"openmp-{options.shape}", {"medians": medians, "gains": gains}))


def _way(way: str) -> AbstractContextManager[Any]:
    return patch.object(openmp, "_gnu_openmp", return_value=None) if way == "kept" else nullcontext()


def _ask(
    engine: Engine, question: list[int], chunks: list[list[int]], options: argparse.Namespace
) -> list[tuple[float, float]]:
    """TTFT and seconds per further token of each thread's second answer; the threads live until all have answered."""

    def answer() -> tuple[float, float]:
        timing = engine.answer(
            question, chunks, ratio=options.ratio, selector="first-k",
            max_new_tokens=options.answer, min_new_tokens=options.answer,
        ).timing  # fmt: skip
        return timing.first_token_s, timing.decode_s / (options.answer - 1)

    pools = [ThreadPoolExecutor(1) for _ in range(options.askers)]
    try:
        return [[pool.submit(answer).result() for pool in pools] for _ in range(2)][1]
    finally:
        for pool in pools:
            pool.shutdown()


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="the tiny shape, two runs", threads=2, runs=5)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--answer", type=int, default=16, help="tokens")
    parser.add_argument("--askers", type=int, default=3, help="threads that ask")
    options = parser.parse_args()
    if options.quick:
        options.shape, options.runs = "tiny", 2
    return options


if __name__ == "__main__":
    main()
