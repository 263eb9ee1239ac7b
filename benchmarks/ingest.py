"""The time to encode chunks for the store, and the time of transformers for the same tokens.

    python -m benchmarks.ingest [--quick] [--threads 2] [--shape qwen2.5-0.5b] [--layers 24] \\
        [--dtype auto]

The baseline is the model of transformers without its head, over the same chunks in batches of the
same number of tokens, with a cache; it stores nothing, and computes in float32 where the processor
does not multiply bfloat16. `warm` computes the same tokens behind a prefix of one token and stores
the entries in memory. All run alternately in one process, and the table has medians.
"""

import argparse
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import report
from benchmarks.ttft_world import auto_dtype, model_of
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import GIB, ControllerConfig
from ragkv.model import PASS_ROWS
from ragkv.model.cpu.product_speed import multiplies_bfloat16

LIMIT = 1.1  # the most that an ingest may take, over the time of transformers


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    lengths = [int(length) for length in options.tokens.split(",")]
    model = model_of(options.shape, "cpu", 1024 + max(lengths), torch.bfloat16, options.layers)
    model.config.bos_token_id = 1  # the prefix
    dtype = auto_dtype(model.config).name if options.dtype == "auto" else options.dtype
    model = model.to(getattr(torch, dtype))
    base = model if multiplies_bfloat16() else copy.deepcopy(model).float()
    print(
        f"{options.shape}, {model.config.num_hidden_layers} layers, random weights, {dtype}, "
        f"{options.threads} threads"
    )
    print(f"transformers computes in {str(base.dtype).removeprefix('torch.')}")
    rows = []
    with _engine(model) as engine:
        for length in lengths:
            count = max(1, options.total // length)
            chunks = _endless_chunks(model.config.vocab_size, length, count)
            actions: dict[str, Callable[[], Any]] = {
                "transformers": lambda chunks=chunks: _by_transformers(base, next(chunks)),
                "warm": lambda chunks=chunks: _warm(engine, next(chunks)),
            }
            medians = report.alternate(actions, options.runs)
            for name, seconds in medians.items():
                limit = f"{LIMIT}x" if name == "warm" else ""
                rate = f"{count * length / seconds:.0f}"
                over = f"{seconds / medians['transformers']:.2f}x"
                rows.append(
                    (f"{count} x {length}", name, f"{seconds * 1e3:.0f}", rate, over, limit)
                )
    report.table(("chunks", "what", "ms", "tokens/s", "over transformers", "at most"), rows)
    name = f"ingest-{options.shape}-{dtype}-{options.threads}"
    print("written:", report.save(name, [list(row) for row in rows]))


def _engine(model: Any) -> Engine:
    store = StoreConfig(memory_bytes=4 * GIB)
    controller = ControllerConfig(measure=False)
    return Engine(model, config=EngineConfig(store=store, controller=controller))


def _endless_chunks(vocabulary: int, length: int, count: int) -> Any:
    """Again and again `count` chunks of random tokens that were never stored."""
    generator = torch.Generator().manual_seed(length)
    for _ in itertools.count():
        yield torch.randint(3, vocabulary, (count, length), generator=generator).tolist()


def _warm(engine: Engine, chunks: Sequence[Sequence[int]]) -> None:
    assert engine.entries.encode(chunks).encoded == len(chunks)
    engine.entries.delete(chunks)


@torch.no_grad()
def _by_transformers(model: Any, chunks: Sequence[Sequence[int]]) -> None:
    size = max(1, PASS_ROWS["cpu"] // len(chunks[0]))
    for start in range(0, len(chunks), size):
        model.model(torch.tensor(chunks[start : start + size]), use_cache=True)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="four layers, one length, three runs", threads=2, runs=5)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, or what this processor computes faster"
    )
    parser.add_argument("--tokens", default="50,150,512", help="lengths of chunks")
    parser.add_argument("--total", type=int, default=1536, help="tokens of all chunks of a run")
    options = parser.parse_args()
    if options.quick:
        options.layers = 4
        options.tokens = "150"
        options.runs = 3
    return options


if __name__ == "__main__":
    main()
