"""Which replica serves a request: one contract and its siblings, chosen by name. Pure Python, and no clock or network.

The router in front of the replicas and the simulator run the very same objects. A router sees who asks, what may be
found stored, and how many requests each replica has; what it knows of the replicas' stores is where it sent what.
Not thread-safe: the owner calls it from one place.

`chunk-aware` is ours. A replica is worth the tokens it was sent before, of those that may be found, less a share of a
mean request for each request it has. Among equals, which is all there is for what nobody was sent yet, the two
rendezvous homes of its parts come first, so that a router that knows nothing goes where others went, and of these the
one less used. Load wins twice beyond that: nobody is given more than a bounded share of the requests under way
(consistent hashing with bounded loads), nor of those sent lately, or in quiet hours one replica would draw all that is
popular and the other stores would lie idle.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from math import ceil
from typing import ClassVar, NamedTuple

from ragkv.errors import ConfigError

MASK = (1 << 64) - 1


class Part(NamedTuple):
    """A run of a prompt that may be stored: a chunk, or a conversation's history."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a router knows of a request."""

    session: str = ""  # its conversation; "" for none
    parts: tuple[Part, ...] = ()  # what may be found, history included


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a router knows of a replica."""

    name: str
    load: int = 0  # requests it has, waiting or being served


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What routers may be given; each reads what it needs."""

    wait_share: float = 1 / 3  # chunk-aware: what a request ahead costs, of a mean request's tokens that may be found
    load_factor: float = 2.0  # chunk-aware: a replica's bound, over the mean of requests under way
    share_factor: float = 1.25  # chunk-aware: a replica's bound, over the mean of requests sent lately
    window: int = 64  # chunk-aware: requests a replica that count as lately
    known_tokens: int | None = (
        None  # chunk-aware: what a replica is taken to hold still, of what it was sent; None: all
    )
    known_parts: int = 100_000  # chunk-aware: parts remembered a replica, whatever their tokens
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("load_factor", "share_factor"):
            if not getattr(self, name) >= 1.0:
                raise ConfigError(f"routing.{name} is {getattr(self, name)}; it must be at least 1.")
        if not self.wait_share >= 0.0:
            raise ConfigError(f"routing.wait_share is {self.wait_share}; it must be at least 0.")
        for name in ("window", "known_parts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"routing.{name} is {getattr(self, name)}; it must be at least 1.")


class Router(ABC):
    """Ranks replicas for a request."""

    name: ClassVar[str]

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self._draw = random.Random(self.settings.seed)

    @abstractmethod
    def rank(self, ask: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        """The names of all `replicas`, the best first. Changes nothing that a later ranking could notice."""

    def sent(self, ask: RoutingRequest, name: str) -> None:  # noqa: B027
        """The request went to the replica of that name, which will hold its parts."""

    def removed(self, name: str) -> None:  # noqa: B027
        """The replica of that name is no more; what it held is forgotten."""


class Random(Router):
    """Any replica."""

    name = "random"

    def rank(self, ask: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        names = [replica.name for replica in replicas]
        self._draw.shuffle(names)
        return names


class RoundRobin(Router):
    """One after another."""

    name = "round-robin"
    _turn = 0

    def rank(self, ask: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        names = [replica.name for replica in replicas]
        first = self._turn % len(names) if names else 0
        return names[first:] + names[:first]

    def sent(self, ask: RoutingRequest, name: str) -> None:
        self._turn += 1


class LeastLoaded(Router):
    """Who has the fewest requests; among equals, any."""

    name = "least-loaded"

    def rank(self, ask: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        return [replica.name for replica in sorted(replicas, key=lambda r: (r.load, self._draw.random()))]


class SessionSticky(Router):
    """A conversation's rendezvous home, whatever its load; without a conversation, who has the fewest requests."""

    name = "session-sticky"

    def rank(self, ask: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        if ask.session:
            return rendezvous(ask.session, [replica.name for replica in replicas])
        return [replica.name for replica in sorted(replicas, key=lambda r: (r.load, self._draw.random()))]


class ChunkAware(Router):
    """Who was sent most of what may be found, less what waiting there costs, within bounds of load."""

    name = "chunk-aware"
    MEAN_OF = 1_000  # requests over which the tokens of a mean request are learned

    def __init__(self, settings: RouterSettings | None = None) -> None:
        super().__init__(settings)
        self._known: dict[str, _Known] = {}  # by replica
        self._holders: dict[str, dict[str, None]] = {}  # names by part
        self._lately: deque[str] = deque()
        self._shares: Counter[str] = Counter()
        self._mean_tokens, self._seen = 0.0, 0
        self._count = 1  # replicas ranked last

    def rank(self, ask: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        names = tuple(replica.name for replica in replicas)
        self._count = len(names)
        loads = bound(sum(replica.load for replica in replicas), len(names), self.settings.load_factor)
        shares = bound(self.settings.window * len(names), len(names), self.settings.share_factor)
        held, hinted = self._held(ask, names)
        wait = self.settings.wait_share * self._mean_tokens

        def place(replica: ReplicaLoad) -> tuple[bool, bool, float, int, int, int]:
            name, load = replica.name, replica.load
            full, often = load + 1 > loads, self._shares[name] + 1 > shares
            # within bounds what is held counts; beyond, load alone
            return full, often, 0.0 if full else wait * load - held[name], load, -hinted[name], self._shares[name]

        return [replica.name for replica in sorted(replicas, key=place)]

    def sent(self, ask: RoutingRequest, name: str) -> None:
        known = self._known.setdefault(name, _Known())
        for key, tokens in ask.parts:
            self._holders.setdefault(key, {})[name] = None
            for forgotten in known.add(key, tokens, self.settings):
                self._let_go(forgotten, name)
        self._seen = min(self._seen + 1, self.MEAN_OF)
        self._mean_tokens += (sum(part.tokens for part in ask.parts) - self._mean_tokens) / self._seen
        self._lately.append(name)
        self._shares[name] += 1
        while len(self._lately) > self.settings.window * self._count:
            self._shares[self._lately.popleft()] -= 1

    def removed(self, name: str) -> None:
        for key in self._known.pop(name, _Known()).parts:
            self._let_go(key, name)
        self._lately = deque(other for other in self._lately if other != name)
        del self._shares[name]

    def _held(self, ask: RoutingRequest, names: tuple[str, ...]) -> tuple[Counter[str], Counter[str]]:
        """Tokens of the request by who probably holds them, and of those nobody holds by where they belong."""
        held: Counter[str] = Counter()
        hinted: Counter[str] = Counter()
        for key, tokens in ask.parts:
            holders = self._holders.get(key)
            for name in holders or homes(key, names):
                (held if holders else hinted)[name] += tokens
        return held, hinted

    def _let_go(self, key: str, name: str) -> None:
        holders = self._holders.get(key, {})
        holders.pop(name, None)
        if not holders:
            self._holders.pop(key, None)


class _Known:
    """What one replica was sent, the last last, as far as it is taken to hold it still."""

    def __init__(self) -> None:
        self.parts: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def add(self, key: str, tokens: int, settings: RouterSettings) -> Iterable[str]:
        """Note a part; those that are forgotten for it."""
        self._tokens += tokens - self.parts.pop(key, 0)
        self.parts[key] = tokens
        forgotten = []
        limit = settings.known_tokens
        while len(self.parts) > settings.known_parts or (limit is not None and self._tokens > limit):
            oldest, size = self.parts.popitem(last=False)
            self._tokens -= size
            forgotten.append(oldest)
        return forgotten


def bound(total: int, replicas: int, factor: float) -> int:
    """The most a replica may have, this request counted: `factor` times the mean, rounded up."""
    return ceil(factor * (total + 1) / max(1, replicas))


def rendezvous(key: str, names: Sequence[str]) -> list[str]:
    """The names by their weight for `key`, the highest first: one that leaves moves nobody else's keys."""
    seed = _digest(key)
    return sorted(names, key=lambda name: _mixed(seed ^ _digest(name)), reverse=True)


@lru_cache(maxsize=1 << 17)
def homes(key: str, names: tuple[str, ...]) -> list[str]:
    """The first two of `rendezvous`: two choices spread what one hash would heap up."""
    seed = _digest(key)
    return nlargest(2, names, key=lambda name: _mixed(seed ^ _digest(name)))


@lru_cache(maxsize=1 << 12)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(value: int) -> int:
    """A 64-bit finaliser (splitmix64's): every bit of the argument moves about half of the result's."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


ROUTERS: dict[str, type[Router]] = {
    router.name: router for router in (Random, RoundRobin, LeastLoaded, SessionSticky, ChunkAware)
}


def make_router(name: str, settings: RouterSettings | None = None) -> Router:
    """A fresh router by its registered name; raises `ConfigError` for a name nobody has."""
    if name not in ROUTERS:
        raise ConfigError(f"Unknown router {name!r}. Known: {', '.join(sorted(ROUTERS))}.")
    return ROUTERS[name](settings)


__all__ = [
    "ROUTERS",
    "RoutingRequest",
    "Part",
    "ReplicaLoad",
    "Router",
    "RouterSettings",
    "bound",
    "homes",
    "make_router",
    "rendezvous",
]
