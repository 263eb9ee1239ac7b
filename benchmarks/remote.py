"""Entries on shared storage: TTFT from memory, disk, Redis and S3; and whether loading hides behind computing.

    python -m benchmarks.remote [--quick]
    python -m benchmarks.remote --shape qwen2.5-0.5b --chunks 6 --tokens 512 --runs 5

Real architectures with random weights and random entries (neither changes time), one question of 32 tokens, batch 1.
Redis is a real server on loopback; S3 is moto's, one Python process, so its times are an upper bound of a real one's
near by. The first table has every tier against full recompute in the same run. The second puts a proxy between engine
and Redis, a process of its own (1 ms each way, 100 MB/s): a pipelined prefill against the longer of loading alone
(lookups and all layers, through the same reader) and computing alone (the same prefill, entries in memory). A selector
that asks the question first (sensitivity-query) computes its second pass when all is loaded: no loading can hide behind
that. The engine is kept from computing what loads slower than it computes, so that loading is what is measured.
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
from benchmarks.ttft_world import QUESTION_TOKENS, model_of
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import RedisConfig, S3Config
from ragkv.fusion.pipeline import LayerReader
from ragkv.model.shapes import SHAPES
from ragkv.store import Entry, EntryInfo, HintedEntry, PrefetchHint
from tests.store.remote.servers import LOOPBACK, RedisServer, S3Server, with_credentials

TIMEOUT_S = 30.0  # nothing is to time out here
DEFAULT = "sensitivity"
ASKING = "sensitivity-query"  # loads all before it chooses
PIPELINED = (DEFAULT, "hkvd", ASKING)
READ_AHEAD = 2  # layers; the config's default


@dataclass(frozen=True)
class Row:
    """TTFT out of one tier."""

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


class World:
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
            Entry(
                EntryInfo(identity.key(chunk), identity, chunk, "of another prompt", *facts),
                kv,
                torch.rand((tokens, 1)).half(),
            )
            for chunk in self.chunks
        ]
        self.size_bytes = sum(entry.size_bytes for entry in self.entries)

    def open(self, store: StoreConfig) -> Engine:
        """An engine that has the entries where `store` says."""
        engine = self._engine.with_config(EngineConfig(store=store))
        engine.parts.load_control._speeds = dict  # or it would compute what a shaped network brings too late
        for entry in self.entries:
            if not engine.parts.store.put_durably(entry):
                raise SystemExit(f"An entry was not kept by {store}.")
        return engine

    def prefill(self, engine: Engine, selector: str, ratio: float) -> Callable[[], Any]:
        """A prefill up to the last row's logits, which must have found everything."""

        def run() -> None:
            found = engine.prefill(self.question, self.chunks, ratio=ratio, selector=selector).reuse
            assert not found.missed_chunks and not found.notes, found.notes

        return run

    def full(self) -> None:
        """Full recompute."""
        self._engine.prefill(self.question, self.chunks, reuse="none")

    def load(self, engine: Engine) -> Callable[[], None]:
        """Lookups and all layers, as a request reads them, and nothing else."""
        identity, adapter, store = engine.parts.encoder.identity, engine.parts.adapter, engine.parts.store
        wanted = tuple(HintedEntry(identity, chunk, 0) for chunk in self.chunks)

        def run() -> None:
            demand = PrefetchHint(wanted)
            store.queued(demand)
            store.started(demand)
            with ExitStack() as held:
                leases = [held.enter_context(_some(store.lease(identity, chunk))) for chunk in self.chunks]
                reader = LayerReader(leases, adapter.layer_count, READ_AHEAD, engine.parts.readers, adapter.device)
                held.enter_context(reader)
                for layer in range(adapter.layer_count):
                    reader.layer(layer)
            store.left(demand)

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
        world = World(engine, options.chunks, options.tokens)
        rows = _tiers(world, redis, s3, folder, options)
        shaped = _pipelines(world, redis, options)
    name = f"remote-{options.shape}{'-quick' if options.quick else ''}"
    found = {"tiers": [asdict(row) for row in rows], "pipeline": [{**asdict(row), "over": row.over} for row in shaped]}
    print("written:", report.save(name, found))
    engine.close()


def _tiers(world: World, redis: RedisServer, s3: S3Server, folder: str, options: argparse.Namespace) -> list[Row]:
    room = 4 * world.size_bytes
    stores = {
        "memory": StoreConfig(memory_bytes=room),
        "disk": StoreConfig(directory=folder, memory_bytes=0, disk_bytes=room),
        "redis": StoreConfig(memory_bytes=0, redis=RedisConfig(url=redis.url, timeout_s=TIMEOUT_S)),
        "s3": StoreConfig(memory_bytes=0, s3=S3Config(bucket=s3.BUCKET, endpoint=s3.url, timeout_s=TIMEOUT_S)),
    }
    with ExitStack() as held:
        engines = {tier: held.enter_context(world.open(store)) for tier, store in stores.items()}
        methods = [("none", 0.0), *((DEFAULT, ratio) for ratio in options.ratios)]
        actions: dict[Any, Callable[[], Any]] = {"full": world.full}
        for tier, one in engines.items():
            actions |= {(tier, *method): world.prefill(one, *method) for method in methods}
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


def _pipelines(world: World, redis: RedisServer, options: argparse.Namespace) -> list[PipelineRow]:
    rows = []
    chosen = [("none", 0.0), *((selector, ratio) for selector in PIPELINED for ratio in options.ratios)]
    for bandwidth in options.bandwidths:
        with ExitStack() as held:
            port = held.enter_context(_shaped(redis.port, options.latency_s, bandwidth))
            url, prefix = f"redis://{LOOPBACK}:{port}/0", f"shaped-{bandwidth:.0f}"
            far = RedisConfig(url=url, prefix=prefix, timeout_s=TIMEOUT_S, group_bytes=options.group_bytes)
            shaped = held.enter_context(world.open(StoreConfig(memory_bytes=0, redis=far)))
            near = held.enter_context(world.open(StoreConfig(memory_bytes=4 * world.size_bytes)))
            actions: dict[Any, Callable[[], Any]] = {"load": world.load(shaped)}
            for method in chosen:
                actions["compute", *method] = world.prefill(near, *method)
                actions["pipelined", *method] = world.prefill(shaped, *method)
            medians: dict[Any, float] = report.alternate(actions, options.runs)
        facts = options.chunks, options.tokens
        for method in chosen:
            took_s = medians["load"], medians["compute", *method], medians["pipelined", *method]
            rows.append(PipelineRow(*facts, *method, world.size_bytes, *took_s))
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
def _shaped(port: int, latency_s: float, bandwidth: float) -> Iterator[int]:
    """The port of a proxy in a process of its own."""
    command = [sys.executable, "-m", "ragkv.testing.faulty_proxy", f"{LOOPBACK}:{port}", "--latency-s", str(latency_s)]
    with subprocess.Popen(
        [*command, "--bandwidth", str(bandwidth)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as proxy:
        assert proxy.stdin is not None and proxy.stdout is not None
        yield int(proxy.stdout.readline())
        proxy.stdin.close()


def _some(lease: Any) -> Any:
    assert lease is not None, "an entry was not found"
    return lease


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape and few runs, for a minute on a laptop")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.15])
    parser.add_argument("--bandwidths", nargs="+", type=float, default=[100e6], help="bytes a second")
    parser.add_argument("--latency-s", type=float, default=0.001, help="of one way")
    parser.add_argument("--group-bytes", type=int, default=512 * 1024, help="of a value; the config's default")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.quick:
        options.shape, options.chunks, options.tokens, options.runs = "tiny", 6, 512, 3
        options.group_bytes = 64 * 1024  # or an entry of so few small layers would be one value
    return options


if __name__ == "__main__":
    main()
