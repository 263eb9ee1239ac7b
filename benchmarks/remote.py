"""Entries on shared storage: TTFT from memory, disk, Redis and S3 against full recompute in the same run.

    python -m benchmarks.remote [--quick]
    python -m benchmarks.remote --shape qwen2.5-0.5b --chunks 6 --tokens 512 --runs 5

Real architectures with random weights and random entries (neither changes time), one question of 32 tokens, batch 1.
Redis is a real server on loopback. S3 is moto's server, one Python process: a real one near by is faster. The
engine may not compute what loads slower than it computes, so that loading is measured.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import report
from benchmarks.random_model import SHAPES, put_random_scores
from benchmarks.ttft_world import QUESTION_TOKENS, model_of
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import RedisConfig, S3Config
from ragkv.store import Entry, EntryInfo
from tests.store.remote.servers import RedisServer, S3Server, with_credentials

TIMEOUT_S = 30.0  # long: no call may time out here
DEFAULT = "sensitivity"


@dataclass(frozen=True)
class Row:
    """The TTFT with entries in one tier."""

    tier: str
    method: str
    ratio: float
    seconds: float  # median
    speedup: float  # over full recompute in the same run


class TierBenchmark:
    """Entries of `chunks` x `tokens` tokens, and engines on one model that read them from one tier each."""

    def __init__(self, engine: Engine, chunks: int, tokens: int) -> None:
        self._engine = engine
        generator = torch.Generator().manual_seed(0)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(3, engine.model.adapter.vocabulary, (count,), generator=generator).tolist())

        self.chunks, self.question = [ids(tokens) for _ in range(chunks)], ids(QUESTION_TOKENS)
        adapter, identity = engine.model.adapter, engine.entries.encoder.identity
        shape = (adapter.layer_count, 2, adapter.kv_heads, tokens, adapter.head_dim)
        kv, facts = torch.randn(shape).to(adapter.dtype), (adapter.layer_count, adapter.kv_heads, adapter.head_dim)
        self.entries = [
            Entry(EntryInfo(identity.key(chunk), identity, chunk, "of another prompt", *facts), kv)
            for chunk in self.chunks
        ]
        self.size_bytes = sum(entry.size_bytes for entry in self.entries)

    def open(self, store: StoreConfig) -> Engine:
        """An engine over `store`, which has all entries."""
        engine = self._engine.with_config(EngineConfig(store=store))
        engine.load_control._speeds = dict  # no measured speeds: it would compute what loads too slowly
        for entry in self.entries:
            if not engine.store.put_durably(entry):
                raise SystemExit(f"An entry was not kept by {store}.")
            put_random_scores(engine, entry.info)
        return engine

    def prefill(self, engine: Engine, selector: str, ratio: float) -> Callable[[], Any]:
        """A prefill up to the last row's logits; it must find every entry."""

        def run() -> None:
            found = engine.prefill(self.question, self.chunks, ratio=ratio, selector=selector).reuse
            assert not found.missed_chunks and not found.notes, found.notes

        return run

    def full(self) -> None:
        """Full recompute."""
        self._engine.prefill(self.question, self.chunks, reuse="none")


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    with_credentials()
    longest = options.chunks * options.tokens + QUESTION_TOKENS
    engine = Engine(model_of(options.shape, "cpu", longest), config=EngineConfig())
    print(
        f"{options.shape}, random weights and entries, {options.chunks} x {options.tokens} + {QUESTION_TOKENS} tokens"
    )
    with ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        redis, s3 = RedisServer(), S3Server()
        held.callback(redis.remove)
        held.callback(s3.kill)
        benchmark = TierBenchmark(engine, options.chunks, options.tokens)
        rows = _tiers(benchmark, redis, s3, folder, options)
    name = f"remote-{options.shape}{'-quick' if options.quick else ''}"
    print("written:", report.save(name, [asdict(row) for row in rows]))
    engine.close()


def _tiers(
    benchmark: TierBenchmark, redis: RedisServer, s3: S3Server, folder: str, options: argparse.Namespace
) -> list[Row]:
    capacity_bytes = 4 * benchmark.size_bytes
    stores = {
        "memory": StoreConfig(memory_bytes=capacity_bytes),
        "disk": StoreConfig(directory=folder, memory_bytes=0, disk_bytes=capacity_bytes),
        "redis": StoreConfig(memory_bytes=0, redis=RedisConfig(url=redis.url, timeout_s=TIMEOUT_S)),
        "s3": StoreConfig(memory_bytes=0, s3=S3Config(bucket=s3.BUCKET, endpoint=s3.url, timeout_s=TIMEOUT_S)),
    }
    with ExitStack() as held:
        engines = {tier: held.enter_context(benchmark.open(store)) for tier, store in stores.items()}
        methods = [("none", 0.0), *((DEFAULT, ratio) for ratio in options.ratios)]
        actions: dict[Any, Callable[[], Any]] = {"full": benchmark.full}
        for tier, one in engines.items():
            actions |= {(tier, *method): benchmark.prefill(one, *method) for method in methods}
        medians: dict[Any, float] = report.alternate(actions, options.runs)
    full_s = medians.pop("full")
    rows = [Row("-", "full recompute", 1.0, full_s, 1.0)]
    for (tier, selector, ratio), took_s in medians.items():
        rows.append(Row(tier, selector, ratio, took_s, full_s / took_s))
    report.table(
        ["tier", "method", "ratio", "TTFT ms", "speedup"],
        [[r.tier, r.method, f"{r.ratio:.2f}", f"{r.seconds * 1e3:.0f}", f"{r.speedup:.2f}x"] for r in rows],
    )
    return rows


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a tiny shape and few runs, for a minute on a laptop", threads=2, runs=5)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.15])
    options = parser.parse_args()
    if options.quick:
        options.shape, options.chunks, options.tokens, options.runs = "tiny", 6, 512, 3
    return options


if __name__ == "__main__":
    main()
