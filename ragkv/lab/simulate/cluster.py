"""Replicas behind a router: each has its own tiers and its own queue, and all may share one more tier.

Requests arrive at the trace's times, `speedup` times as fast. The router, one of `scheduling/replica_routing.py`, sees
the same as live: which conversation asks for which parts, and how many requests each replica has. A replica prefills
one request at a time, first come first served; decoding runs in parallel and is not counted. Hits depend on the order
of arrival alone, so one replica finds exactly what `replay` and `replay_chunks` find; the shared tier has an entry once
the prefill that made it is over. As in the live store, every put reaches every tier, so the disk still has what memory
drops.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragkv.config import at_least
from ragkv.errors import ConfigError
from ragkv.scheduling.replica_routing import ReplicaLoad, RoutedPart, RouterSettings, RoutingRequest, make_router
from ragkv.store.policies import Policy, PrefixTier

from .chunks import ChunkTier, Read, position_free, replay_chunks
from .policies import ALL_POLICIES, make_any_policy
from .readers import RagRequest
from .report import replay
from .run import ReplaySetting, policy_for
from .token_times import TokenTimes
from .trace import Trace


@dataclass(frozen=True)
class ReplicaSetup:
    """The replicas that serve a load, and the router in front of them."""

    replicas: int
    memory_tokens: int  # of each replica
    disk_tokens: int = 0  # of each replica; 0: none
    remote_tokens: int | None = 0  # of the tier all share; 0: none; None: without bound
    remote_from: int = 1  # a chunk is written to the shared tier once it was computed so often
    policy: str = "lru"  # of every tier
    router: str = "chunk-aware"
    routers: int = 1  # routers that take requests in turns and know nothing of each other
    routing: RouterSettings = field(default_factory=RouterSettings)
    profile: TokenTimes = field(default_factory=TokenTimes)
    speedup: float = 1.0  # of the trace's times
    xi_blocks: int = 0  # for policies that serve the tail

    def __post_init__(self) -> None:
        at_least(self, replicas=1, memory_tokens=0, disk_tokens=0, remote_tokens=0, remote_from=1, routers=1)
        if not self.speedup > 0:
            raise ConfigError(f"speedup is {self.speedup}; it must be more than 0.")
        if self.policy in ALL_POLICIES and ALL_POLICIES[self.policy].needs_future:
            raise ConfigError(
                f"Policy {self.policy!r} knows the future of one store, not of a replica: see `RequestLoad.bounds`."
            )


class FoundTokens(NamedTuple):
    """Tokens of one prompt by where they came from; the first four sum to its length."""

    memory: int
    disk: int
    remote: int
    computed: int
    written: int = 0  # to the shared tier, in addition


class Stores(ABC):
    """The tiers of all replicas, and the tier they share."""

    @abstractmethod
    def serve(self, number: int, replica: int, start_s: float) -> FoundTokens:
        """Serve request `number` of the load on a replica, from `start_s` on."""

    def finished(self, end_s: float) -> None:  # noqa: B027
        """The prefill served last ends at `end_s`: the others may read what it computed from then on."""


class RequestLoad(ABC):
    """Requests in order of time, as replicas see them."""

    name: str
    times: Sequence[float]  # seconds
    tokens: Sequence[int]  # of each prompt
    routing_requests: Sequence[RoutingRequest]

    @abstractmethod
    def stores(self, shape: ReplicaSetup) -> Stores:
        """Empty tiers."""

    @abstractmethod
    def bounds(self, shape: ReplicaSetup) -> "Bounds":
        """The hit shares that no routing can exceed."""

    def speedup_for(self, busy: float, replicas: int, profile: TokenTimes) -> float:
        """The speedup at which `replicas` would be busy this share of the time without any hit; at 1 or more they would
        not keep up."""
        work_s = (profile.fixed_ms * len(self.tokens) + profile.token_ms * sum(self.tokens)) / 1000
        return busy * replicas * (self.times[-1] - self.times[0]) / work_s


@dataclass(frozen=True)
class Bounds:
    """Shares of all prompt tokens that an offline store finds."""

    unbounded: float  # one store without bound: all but first reads
    belady: float  # one store of all replicas' capacity that knows the future


@dataclass(frozen=True)
class Routed:
    """The result of a load. Times are TTFT: waiting and prefill."""

    router: str
    replicas: int
    memory: float  # shares of all prompt tokens, by where they were found
    disk: float
    remote: float
    written: float  # tokens written to the shared tier, over all prompt tokens
    median_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    wait_p95_ms: float  # waiting alone
    busy: float  # mean share of the time that a replica prefills
    imbalance: float  # the prefill time of the busiest replica over the mean
    most_requests: float  # the most requests of a replica over the mean

    @property
    def local(self) -> float:
        """The share found on the replica itself."""
        return self.memory + self.disk

    @property
    def found(self) -> float:
        """The share found in any tier."""
        return self.local + self.remote


def serve_replicas(load: RequestLoad, shape: ReplicaSetup) -> Routed:
    """Serve a load; raises `ConfigError` for an unknown router or policy."""
    done = route(load, shape)
    ttft, work = done.ttft_ms, done.ttft_ms - done.wait_ms
    shares = np.array(done.found).sum(axis=0) / max(1, sum(load.tokens))
    works = np.bincount(done.replica, weights=work, minlength=shape.replicas)
    counts = np.bincount(done.replica, minlength=shape.replicas)
    ends = np.array(load.times) / shape.speedup * 1000 + ttft
    lasted = float(ends.max()) - load.times[0] / shape.speedup * 1000
    return Routed(
        router=shape.router,
        replicas=shape.replicas,
        memory=float(shares[0]),
        disk=float(shares[1]),
        remote=float(shares[2]),
        written=float(shares[4]),
        median_ms=float(np.percentile(ttft, 50)),
        p95_ms=float(np.percentile(ttft, 95)),
        p99_ms=float(np.percentile(ttft, 99)),
        mean_ms=float(ttft.mean()),
        wait_p95_ms=float(np.percentile(done.wait_ms, 95)),
        busy=float(works.mean() / lasted),
        imbalance=float(works.max() / works.mean()),
        most_requests=float(counts.max() / counts.mean()),
    )


@dataclass(frozen=True)
class Served:
    """Every request of a load, in order."""

    found: list[FoundTokens]
    replica: list[int]
    ttft_ms: NDArray[np.float64]
    wait_ms: NDArray[np.float64]  # waiting alone, part of ttft_ms


def route(load: RequestLoad, shape: ReplicaSetup) -> Served:
    """Serve a load, request by request."""
    routers = [make_router(shape.router, shape.routing) for _ in range(shape.routers)]
    stores, queues = load.stores(shape), [_ReplicaQueue() for _ in range(shape.replicas)]
    names = [f"r{number}" for number in range(shape.replicas)]
    ttft, wait = np.zeros(len(load.times)), np.zeros(len(load.times))
    found: list[FoundTokens] = []
    chosen: list[int] = []
    for number, (at, request) in enumerate(zip(load.times, load.routing_requests, strict=True)):
        now, router = at / shape.speedup, routers[number % len(routers)]
        loads = [ReplicaLoad(name, queue.load(now)) for name, queue in zip(names, queues, strict=True)]
        name = router.rank(request, loads)[0]
        router.sent(request, name)
        replica = names.index(name)
        start = max(now, queues[replica].free_s)
        got = stores.serve(number, replica, start)
        end = start + shape.profile.ttft_ms(got.computed, got.memory, got.disk, got.remote) / 1000
        stores.finished(end)
        queues[replica].add(end)
        found.append(got)
        chosen.append(replica)
        ttft[number], wait[number] = (end - now) * 1000, (start - now) * 1000
    return Served(found, chosen, ttft, wait)


class _ReplicaQueue:
    """One replica's requests: when each will be done."""

    def __init__(self) -> None:
        self.free_s = float("-inf")
        self._ends: deque[float] = deque()

    def load(self, now: float) -> int:
        """Number of requests that wait or are being served."""
        while self._ends and self._ends[0] <= now:
            self._ends.popleft()
        return len(self._ends)

    def add(self, end: float) -> None:
        self.free_s = end
        self._ends.append(end)


class RagLoad(RequestLoad):
    """RAG requests: stored parts are found wherever they stand; the rest is computed."""

    def __init__(self, requests: Sequence[RagRequest], name: str = "RAG", times: Sequence[float] | None = None) -> None:
        """`times`, in order, replace the requests' own."""
        self.name = name
        self.times = [request.at for request in requests] if times is None else times
        self.tokens = [request.tokens for request in requests]
        self.reads = [position_free([request]) for request in requests]
        self.routing_requests = [
            RoutingRequest(request.session, tuple(RoutedPart(read.key, read.tokens) for read in reads))
            for request, reads in zip(requests, self.reads, strict=True)
        ]

    @cached_property
    def stored_tokens(self) -> int:
        """Tokens of all stored parts, each counted once."""
        return sum({read.key: read.tokens for reads in self.reads for read in reads}.values())

    def stores(self, shape: ReplicaSetup) -> Stores:
        return _ChunkStores(self, shape)

    def bounds(self, shape: ReplicaSetup) -> Bounds:
        reads, tokens = [read for reads in self.reads for read in reads], sum(self.tokens)
        capacity = self.stored_tokens if shape.remote_tokens is None else total_capacity(shape)
        belady = replay_chunks(reads, make_any_policy("belady"), capacity)
        unbounded = replay_chunks(reads, make_any_policy("fifo"), self.stored_tokens)
        return Bounds(unbounded.hit_tokens / tokens, belady.hit_tokens / tokens)


class TurnLoad(RequestLoad):
    """A trace of conversations: each replica that served a conversation's turns holds a prefix of its blocks."""

    def __init__(self, trace: Trace, times: Sequence[float] | None = None) -> None:
        """`times`, in order, replace the turns' own."""
        self.name = trace.name
        self.trace = trace
        self.block = trace.block_tokens
        self.times = [turn.at for turn in trace.turns] if times is None else times
        self.tokens = [turn.prompt * self.block for turn in trace.turns]
        self.routing_requests = [
            RoutingRequest(turn.group, (RoutedPart(turn.group, turn.shared * self.block),)) for turn in trace.turns
        ]

    def stores(self, shape: ReplicaSetup) -> Stores:
        return _TurnStores(self, shape)

    def bounds(self, shape: ReplicaSetup) -> Bounds:
        blocks = sum(turn.prompt for turn in self.trace.turns)
        capacity = self.trace.weight if shape.remote_tokens is None else total_capacity(shape) // self.block
        belady = replay(self.trace, make_any_policy("belady"), capacity)
        unbounded = replay(self.trace, make_any_policy("fifo"), self.trace.weight)
        return Bounds(1 - sum(unbounded.uncached) / blocks, 1 - sum(belady.uncached) / blocks)


def poisson(count: int, over_s: float, seed: int = 0) -> list[float]:
    """Arrival times of a Poisson process with `count` arrivals in `over_s` seconds."""
    draw = random.Random(seed)
    return sorted(draw.uniform(0, over_s) for _ in range(count))


def total_capacity(shape: ReplicaSetup) -> int:
    """Tokens that all replicas and the shared tier hold together; a disk holds what its memory holds, too."""
    return shape.replicas * max(shape.memory_tokens, shape.disk_tokens) + (shape.remote_tokens or 0)


class _ChunkStores(Stores):
    def __init__(self, load: RagLoad, shape: ReplicaSetup) -> None:
        def tiers(tokens: int) -> list[ChunkTier]:
            return [ChunkTier(make_any_policy(shape.policy), tokens) for _ in range(shape.replicas)]

        self._load = load
        self._memories, self._disks = tiers(shape.memory_tokens), tiers(shape.disk_tokens)
        remote = load.stored_tokens if shape.remote_tokens is None else shape.remote_tokens
        self._remote = ChunkTier(make_any_policy(shape.policy), remote)
        self._ready: dict[str, float] = {}  # key -> when the shared tier has it
        self._from, self._times_made = shape.remote_from, Counter[str]()
        self._made: list[str] = []
        self._written = 0

    def serve(self, number: int, replica: int, start_s: float) -> FoundTokens:
        memory, disk = self._memories[replica], self._disks[replica]
        from_memory = from_disk = from_remote = 0
        self._made, self._written = [], 0
        for read in self._load.reads[number]:
            on_disk, in_memory = disk.read(read), memory.read(read)
            if in_memory:
                from_memory += read.tokens
            elif on_disk:
                from_disk += read.tokens
            elif self._is_remote(read, start_s):
                from_remote += read.tokens
            else:
                self._made.append(read.key)
        computed = self._load.tokens[number] - from_memory - from_disk - from_remote
        return FoundTokens(from_memory, from_disk, from_remote, computed, self._written)

    def _is_remote(self, read: Read, start_s: float) -> bool:
        if read.key not in self._remote.held:
            self._times_made[read.key] += 1
            if self._times_made[read.key] < self._from:
                return False
        if not self._remote.read(read):  # puts it, if it fits
            self._ready[read.key] = float("inf")
            self._written += read.tokens if read.key in self._remote.held else 0
        return self._ready[read.key] <= start_s

    def finished(self, end_s: float) -> None:
        for key in self._made:
            if key in self._ready:
                self._ready[key] = min(end_s, self._ready[key])


class _TurnStores(Stores):
    def __init__(self, load: TurnLoad, shape: ReplicaSetup) -> None:
        self._turns, self._block = load.trace.turns, load.block

        def policy(blocks: int) -> Policy:
            return policy_for(shape.policy, load.trace, ReplaySetting(blocks, xi_blocks=shape.xi_blocks))

        def tiers(tokens: int) -> list[PrefixTier]:
            blocks = tokens // load.block
            return [PrefixTier(policy(blocks), blocks) for _ in range(shape.replicas)]

        self._memories, self._disks = tiers(shape.memory_tokens), tiers(shape.disk_tokens)
        remote = load.trace.weight if shape.remote_tokens is None else shape.remote_tokens // load.block
        self._remote = PrefixTier(policy(remote), remote)

    def serve(self, number: int, replica: int, start_s: float) -> FoundTokens:
        turn = self._turns[number]
        memory = turn.prompt - self._memories[replica].serve(turn)
        disk = max(0, turn.prompt - self._disks[replica].serve(turn) - memory)
        had = self._remote.held.get(turn.group, 0)
        remote = max(0, turn.prompt - self._remote.serve(turn) - memory - disk)
        written = max(0, self._remote.held.get(turn.group, 0) - had)
        blocks = (memory, disk, remote, turn.prompt - memory - disk - remote, written)
        return FoundTokens(*(count * self._block for count in blocks))
