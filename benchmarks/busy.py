"""A busy machine: full recompute, a warm first token, an answer and encoding beside processes that
only count, on fixed numbers of threads and on the number that the engine chooses.

    python -m benchmarks.busy [--quick] [--hogs 0 1 2 4] [--threads 2]

The chosen number should take at most 1.15 times the best fixed one, and all give the same bits.
SmolLM2, prompts of six chunks of 128 tokens and a question of 32, random entries in int8; encoding
is of two new chunks. Ways alternate, and the table has medians in seconds.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import report
from benchmarks.ttft_world import OUR_FULL, REAL, Method, World, model_of
from ragkv.runtime import ThreadChoice
from ragkv.runtime.processor import measured_use

CHUNKS = 6
CHUNK_TOKENS = 128
ANSWER_TOKENS = 12
SETTLE_S = 1.0  # before the first run beside other processes
CHOSEN = "chosen"


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    model = model_of("tiny" if options.quick else REAL, "cpu", 0)
    ways = [*range(1, options.threads + 1), CHOSEN]
    found = list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory() as directory,
        World(model, CHUNKS, CHUNK_TOKENS, "memory", directory, codec="int8") as world,
    ):
        threads = world.engine.model.compute.threads
        actions = _actions(world)
        for action in actions.values():
            action()
        for hogs in options.hogs:
            with _beside(hogs):
                found += _measured(hogs, ways, actions, threads, options)
    print(f"smollm2, bf16, {report.machine()['cpu']}, {options.threads} threads at most")
    report.table(
        ["hogs", "action", *(f"{way}" for way in ways), "chosen / best", "chose", "same bits"],
        [
            [
                *(row["hogs"], row["action"], *(row["seconds"][str(way)] for way in ways)),
                f"{row['over_best']:.2f}",
                row["chose"],
                row["same_bits"],
            ]
            for row in found
        ],
    )
    print("written:", report.save(f"busy{options.tag and f'-{options.tag}'}", found))


def _measured(
    hogs: int,
    ways: list[Any],
    actions: dict[str, Callable[[], torch.Tensor]],
    threads: ThreadChoice,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    kept = options.threads  # what was chosen last
    for name, action in actions.items():
        times: dict[str, list[float]] = {str(way): [] for way in ways}
        results = list[torch.Tensor]()
        chose = set[int]()
        for _ in range(options.runs):
            for way in ways:
                threads._measure = measured_use if way == CHOSEN else lambda: None
                threads.count = kept if way == CHOSEN else way
                began = time.perf_counter()
                results.append(action())
                times[str(way)].append(time.perf_counter() - began)
                if way == CHOSEN:
                    kept = threads.count
                    chose.add(kept)
        medians = {way: statistics.median(taken) for way, taken in times.items()}
        best = min(seconds for way, seconds in medians.items() if way != CHOSEN)
        yield {
            "hogs": hogs,
            "action": name,
            "seconds": medians,
            "over_best": medians[CHOSEN] / best,
            "chose": "/".join(map(str, sorted(chose))),
            "same_bits": all(torch.equal(one, results[0]) for one in results),
        }


def _actions(world: World) -> dict[str, Callable[[], torch.Tensor]]:
    full, warm = (world.action(Method(name, 0.15)) for name in (OUR_FULL, "attention"))
    engine = world.engine
    encoder = engine.entries.encoder

    def answer() -> torch.Tensor:
        made = engine.answer(
            world.question,
            world.chunks,
            ratio=0.15,
            selector="attention",
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
        )
        return torch.tensor(made.token_ids)

    def encode() -> torch.Tensor:
        with engine.parts.idle_time.encoding():
            made = encoder.chunks(world.chunks[:2])
        return torch.cat([entry.kv.flatten() for entry in made])

    return {
        "full recompute": lambda: full().logits,
        "warm first token": lambda: warm().logits,
        f"answer of {ANSWER_TOKENS}": answer,
        "encoding": encode,
    }


@contextmanager
def _beside(count: int) -> Iterator[None]:
    """So many processes that only count run inside the block."""
    spawn = multiprocessing.get_context("spawn")
    hogs = [spawn.Process(target=_count, daemon=True) for _ in range(count)]
    for hog in hogs:
        hog.start()
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.join()


def _count() -> None:
    number = 0
    while True:
        number += 1


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a tiny shape", threads=2, runs=3)
    parser.add_argument("--hogs", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--tag", default="", help="added to the results' name")
    options = parser.parse_args()
    if options.quick:
        options.hogs, options.runs, options.tag = [0, 2], 1, "quick"
    return options


if __name__ == "__main__":
    main()
