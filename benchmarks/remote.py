"""Entries on shared storage: TTFT from memory, disk, Redis and S3; and whether loading hides behind computing.

    python -m benchmarks.remote [--quick]
    python -m benchmarks.remote --shape qwen2.5-0.5b --chunks 6 --tokens 512 --runs 5

Real architectures with random weights and random entries (neither changes time), one question of 32 tokens, batch 1.
Redis is a real server on loopback. S3 is moto's server, one Python process: a real one near by is faster. The first
table compares every tier with full recompute in the same run. For the second table a proxy (1 ms each way, 100 MB/s),
in a process of its own, stands between engine and Redis. It compares a pipelined prefill with the longer of loading
alone (lookups and all layers, through the same reader) and computing alone (the same prefill, entries in memory). A
selector that scores by the question first (sensitivity-query) begins its second pass when all is loaded, so no loading
hides behind that pass. The engine may not compute what loads slower than it computes, so that loading is measured.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import report
from benchmarks.random_scores import put_random_scores
from benchmarks.ttft_world import QUESTION_TOKENS, model_of
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import RedisConfig, S3Config
from ragkv.fusion.pipeline import LayerReader
from ragkv.model.shapes import SHAPES
from ragkv.store import Entry, EntryInfo, HintedEntry, Lease, PrefetchHint
from tests.store.remote.servers import LOOPBACK, RedisServer, S3Server, with_credentials

TIMEOUT_S = 30.0  # long: no call may time out here
DEFAULT = "sensitivity"
SCORES_BY_QUESTION = "sensitivity-query"  # loads all before it chooses
PIPELINED = (DEFAULT, "hkvd", SCORES_BY_QUESTION)
READ_AHEAD = 2  # layers; the config's default


@dataclass(frozen=True)
class Row:
    """The TTFT with entries in one tier."""

    tier: str
    method: str
    ratio: float
    seconds: float  # median
    speedup: float  # over full recompute in the same run


@dataclass(frozen=True)
class PipelineRow:
    """One prefill through the shaped network."""

    chunks: int
    tokens: int
    selector: str
    ratio: float
    loaded_bytes: int
    load_s: float
    compute_s: float
    pipelined_s: float

    @property
    def over(self) -> float:
        """Pipelined over the longer of the two: 1 is perfect."""
        return self.pipelined_s / max(self.load_s, self.compute_s)


class TierBenchmark:
    """Entries of `chunks` x `tokens` tokens, and engines on one model that read them from one tier each."""

    def __init__(self, engine: Engine, chunks: int, tokens: int) -> None:
        self._engine = engine
        generator = torch.Generator().manual_seed(0)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(3, engine.parts.adapter.vocabulary, (count,), generator=generator).tolist())

        self.chunks, self.question = [ids(tokens) for _ in range(chunks)], ids(QUESTION_TOKENS)
        adapter, identity = engine.parts.adapter, engine.parts.encoder.identity
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
        engine.parts.load_control._speeds = dict  # no measured speeds: it would compute what loads too slowly
        for entry in self.entries:
            if not engine.parts.store.put_durably(entry):
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

    def load(self, engine: Engine) -> Callable[[], None]:
        """Only the lookups and the reading of all layers, as in a request."""
        identity, adapter, store = engine.parts.encoder.identity, engine.parts.adapter, engine.parts.store
        wanted = tuple(HintedEntry(identity, chunk, 0) for chunk in self.chunks)

        def run() -> None:
            hint = PrefetchHint(wanted)
            store.queued(hint)
            store.started(hint)
            with ExitStack() as held:
                leases = [held.enter_context(_found(store.lease(identity, chunk))) for chunk in self.chunks]
                reader = LayerReader(leases, adapter.layer_count, READ_AHEAD, engine.parts.readers, adapter.device)
                held.enter_context(reader)
                for layer in range(adapter.layer_count):
                    reader.layer(layer)
            store.left(hint)

        return run


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
        shaped = _pipelines(benchmark, redis, options)
    name = f"remote-{options.shape}{'-quick' if options.quick else ''}"
    found = {"tiers": [asdict(row) for row in rows], "pipeline": [{**asdict(row), "over": row.over} for row in shaped]}
    print("written:", report.save(name, found))
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


def _pipelines(benchmark: TierBenchmark, redis: RedisServer, options: argparse.Namespace) -> list[PipelineRow]:
    rows = []
    chosen = [("none", 0.0), *((selector, ratio) for selector in PIPELINED for ratio in options.ratios)]
    for bandwidth in options.bandwidths:
        with ExitStack() as held:
            port = held.enter_context(_proxy_process(redis.port, options.latency_s, bandwidth))
            url, prefix = f"redis://{LOOPBACK}:{port}/0", f"shaped-{bandwidth:.0f}"
            through_proxy = RedisConfig(url=url, prefix=prefix, timeout_s=TIMEOUT_S, group_bytes=options.group_bytes)
            shaped = held.enter_context(benchmark.open(StoreConfig(memory_bytes=0, redis=through_proxy)))
            in_memory = held.enter_context(benchmark.open(StoreConfig(memory_bytes=4 * benchmark.size_bytes)))
            actions: dict[Any, Callable[[], Any]] = {"load": benchmark.load(shaped)}
            for method in chosen:
                actions["compute", *method] = benchmark.prefill(in_memory, *method)
                actions["pipelined", *method] = benchmark.prefill(shaped, *method)
            medians: dict[Any, float] = report.alternate(actions, options.runs)
        facts = options.chunks, options.tokens
        for method in chosen:
            took_s = medians["load"], medians["compute", *method], medians["pipelined", *method]
            rows.append(PipelineRow(*facts, *method, benchmark.size_bytes, *took_s))
        print(f"\nthrough a proxy: {options.latency_s * 1e3:g} ms each way, {bandwidth / 1e6:g} MB/s")
        report.table(
            ["selector", "ratio", "MB", "load ms", "compute ms", "pipelined ms", "over max"],
            [
                [
                    r.selector,
                    f"{r.ratio:.2f}",
                    f"{r.loaded_bytes / 1e6:.1f}",
                    *(f"{seconds * 1e3:.0f}" for seconds in (r.load_s, r.compute_s, r.pipelined_s)),
                    f"{r.over:.2f}x",
                ]
                for r in rows[-len(chosen) :]
            ],
        )
    return rows


@contextmanager
def _proxy_process(port: int, latency_s: float, bandwidth: float) -> Iterator[int]:
    """Run a proxy in a process of its own; its port."""
    command = [
        sys.executable,
        "-m",
        "ragkv.lab.testing.faulty_proxy",
        f"{LOOPBACK}:{port}",
        "--latency-s",
        str(latency_s),
    ]
    with subprocess.Popen(
        [*command, "--bandwidth", str(bandwidth)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as proxy:
        assert proxy.stdin is not None and proxy.stdout is not None
        yield int(proxy.stdout.readline())
        proxy.stdin.close()


def _found(lease: Lease | None) -> Lease:
    assert lease is not None, "an entry was not found"
    return lease


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a tiny shape and few runs, for a minute on a laptop", threads=2, runs=5)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.15])
    parser.add_argument("--bandwidths", nargs="+", type=float, default=[100e6], help="bytes a second")
    parser.add_argument("--latency-s", type=float, default=0.001, help="of one direction")
    parser.add_argument("--group-bytes", type=int, default=512 * 1024, help="of a layer group; the config's default")
    options = parser.parse_args()
    if options.quick:
        options.shape, options.chunks, options.tokens, options.runs = "tiny", 6, 512, 3
        options.group_bytes = 64 * 1024  # else an entry of so few small layers would be one value
    return options


if __name__ == "__main__":
    main()
