"""Tokens/s of batched decoding: 1, 4 and 16 prompts one after the other, in one step, and through
the engine's batch.

    python -m benchmarks.throughput [--quick] [--shape qwen2.5-0.5b]

The engine's decode batch has a thread for each prompt; the mean number of rows in a step is shown.
All run on threads, as in a server. The main thread releases its OpenMP thread pool before, because
an idle pool would slow all of them. Weights and KV are random, which changes no time.
`benchmarks.serving` has whole requests.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch

from benchmarks import report
from benchmarks.kcache import random_kv
from benchmarks.random_model import SHAPES, random_model
from ragkv import EngineConfig
from ragkv.model import Adapter, PromptKV, adapt, grown
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.decode.sampling import Sampler, Sampling
from ragkv.runtime import FairLock, openmp
from ragkv.scheduling import decode_batch as batching


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    print(
        f"{options.shape}, random weights, bf16, {report.machine()['cpu']}, {options.threads} "
        "threads"
    )
    _decode(adapt(random_model(options.shape), EngineConfig().packed_bytes), options)


def _decode(adapter: Adapter, options: argparse.Namespace) -> None:
    found: list[dict[str, Any]] = []
    for count in options.rows:
        lengths = [options.prompt_tokens + 37 * at for at in range(count)]
        prompts = [grown(random_kv(adapter, length, None), options.steps) for length in lengths]

        def one_by_one(prompts: Sequence[PromptKV] = prompts) -> None:
            for kv in prompts:
                _answer(
                    adapter,
                    lambda token, kv=kv: decode_rows(adapter, [DecodeRow(kv, token)])[0],
                    options.steps,
                )
            _rewind(prompts, options.steps)

        def together(prompts: Sequence[PromptKV] = prompts) -> None:
            for _ in range(options.steps):
                decode_rows(adapter, [DecodeRow(kv, 5) for kv in prompts])
            _rewind(prompts, options.steps)

        sizes: list[float] = []

        def threads(prompts: Sequence[PromptKV] = prompts, sizes: list[float] = sizes) -> None:
            sizes.append(_through_batch(adapter, prompts, options.steps))
            _rewind(prompts, options.steps)

        actions = {"one by one": one_by_one, "together": together, "engine's batch": threads}
        seconds = report.alternate(
            {name: _on_a_thread(action) for name, action in actions.items()}, options.runs
        )
        for name, taken in seconds.items():
            rows = {"one by one": 1.0, "together": float(count)}.get(name, statistics.fmean(sizes))
            tokens = count * options.steps / taken
            gain = seconds["one by one"] / taken
            found.append(
                {
                    "rows": count,
                    "how": name,
                    "tokens_per_s": tokens,
                    "gain": gain,
                    "mean_batch": rows,
                }
            )
    report.table(
        ("prompts", "how", "tokens/s", "of one by one", "rows a step"),
        [
            (
                r["rows"],
                r["how"],
                f"{r['tokens_per_s']:.1f}",
                f"{r['gain']:.2f}x",
                f"{r['mean_batch']:.1f}",
            )
            for r in found
        ],
    )
    print("written:", report.save(f"throughput-decode-{options.shape}", found))


def _rewind(prompts: Sequence[PromptKV], steps: int) -> None:
    for kv in prompts:
        kv.length -= steps


def _on_a_thread(action: Callable[[], None]) -> Callable[[], None]:
    """`action` on its own thread, as a server runs requests."""

    def run() -> None:
        openmp.release_threads()  # of this thread
        with ThreadPoolExecutor(1) as pool:
            pool.submit(action).result()

    return run


def _answer(adapter: Adapter, step: Callable[[int], torch.Tensor], steps: int) -> None:
    """Decodes `steps` tokens of one prompt with a sampler."""
    sampler = Sampler(Sampling(), torch.tensor([1]), ())
    logits = torch.zeros(adapter.vocabulary)
    for _ in range(steps):
        logits = step(sampler.choose(logits))
    sampler.choose(logits)


def _through_batch(adapter: Adapter, prompts: Sequence[PromptKV], steps: int) -> float:
    """Decodes each prompt on its own thread with its own sampler; returns the mean number of rows
    in a step.
    """
    batch = batching.DecodeBatch(adapter, FairLock())
    sizes = []

    def counting(adapter: Adapter, rows: Sequence[DecodeRow]) -> torch.Tensor:
        sizes.append(len(rows))
        return decode_rows(adapter, rows)

    def one(kv: PromptKV) -> None:
        with batch.slot(kv) as slot:
            _answer(adapter, lambda token: slot.verify(token)[0], steps)

    with (
        mock.patch.object(batching, "decode_rows", counting),
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        list(pool.map(one, prompts))
    return statistics.fmean(sizes)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a tiny shape", threads=2, runs=3)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 4, 16], help="prompts that decode"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        help="of the shortest prompt; each next has 37 more",
    )
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    if options.quick:
        options.shape = "tiny"
    return options


if __name__ == "__main__":
    main()
