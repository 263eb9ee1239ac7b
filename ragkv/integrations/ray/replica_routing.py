"""Routers: which replica serves a request. One contract and its implementations, chosen by name; no clock, no network.

A router sees the request's conversation, the parts that may be stored, and how many requests each replica has. Of the
replicas' stores it knows only what it sent where. Not thread-safe: the owner calls it from one place.

`chunk-aware` is ours. It scores a replica by the tokens of the request that were sent there before, less a share of a
mean request for each request the replica has. Replicas of equal score, such as all of them for new parts, are ordered
by rendezvous hash: the two homes of the parts come first, so that routers without knowledge agree, and of these the
less used one. Load limits override the score twice. No replica gets more than a bounded share of the requests in
progress (consistent hashing with bounded loads), nor of the requests sent recently: otherwise one replica would attract
all popular parts in quiet hours, and the other stores would be unused.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from math import ceil
from typing import ClassVar, NamedTuple

from ragkv.errors import ConfigError

WAIT_SHARE = 1.0  # Each request that a replica has costs so many times a mean request's tokens.
LOAD_FACTOR = 2.0  # No replica gets more than so many times the mean of the requests in progress,
SHARE_FACTOR = 1.25  # nor more than so many times the mean of the requests sent recently:
WINDOW = 64  # these are the last so many for each replica.
KNOWN_PARTS = 100_000  # For each replica so many parts are remembered.
MEAN_OF = 1_000  # The mean number of tokens is that of so many requests.
MASK = (1 << 64) - 1  # `MASK` keeps the 64 bits of a hash.


class RoutedPart(NamedTuple):
    """A part of a prompt that may be stored: a chunk, or a conversation's history."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a router knows of a request."""

    session: str = ""  # its conversation; "" for none
    parts: tuple[RoutedPart, ...] = ()  # the parts that may be stored, history included


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a router knows of a replica."""

    name: str
    load: int = 0  # requests it has, waiting or being served


class Router(ABC):
    """Ranks replicas for a request."""

    name: ClassVar[str]

    @abstractmethod
    def rank(self, request: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        """The names of all `replicas`, the best first. Does not change the router's knowledge."""

    @abstractmethod
    def sent(self, request: RoutingRequest, name: str) -> None:
        """The request was sent to the replica `name`, which will hold its parts."""

    def removed(self, name: str) -> None:  # noqa: B027
        """The replica `name` no longer exists; the router forgets what it held."""


class RoundRobinRouter(Router):
    """One replica after another: the baseline."""

    name = "round-robin"
    _turn = 0

    def rank(self, request: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        names = [replica.name for replica in replicas]
        first = self._turn % len(names) if names else 0
        return names[first:] + names[:first]

    def sent(self, request: RoutingRequest, name: str) -> None:
        self._turn += 1


class ChunkAwareRouter(Router):
    """The replica that was sent most of the request's tokens, less the cost of waiting, within load limits."""

    name = "chunk-aware"

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[str, None]] = {}  # replica -> the parts it was sent, the most recent last
        self._holders: dict[str, dict[str, None]] = {}  # part -> replicas that were sent it
        self._recent: deque[str] = deque()  # replicas of the requests sent recently
        self._recent_counts: Counter[str] = Counter()
        self._mean_tokens, self._seen = 0.0, 0
        self._replicas = 1  # number of replicas ranked last

    def rank(self, request: RoutingRequest, replicas: Sequence[ReplicaLoad]) -> list[str]:
        names = tuple(replica.name for replica in replicas)
        self._replicas = len(names)
        most_load = limit(sum(replica.load for replica in replicas), len(names), LOAD_FACTOR)
        most_recent = limit(WINDOW * len(names), len(names), SHARE_FACTOR)
        held, homed = self._held(request, names)
        wait = WAIT_SHARE * self._mean_tokens

        def order(replica: ReplicaLoad) -> tuple[bool, bool, float, int, int, int]:
            name, load, recent = replica.name, replica.load, self._recent_counts[replica.name]
            full = load + 1 > most_load
            cost = 0.0 if full else wait * load - held[name]  # beyond the load limit, load alone counts
            return full, recent + 1 > most_recent, cost, load, -homed[name], recent

        return [replica.name for replica in sorted(replicas, key=order)]

    def sent(self, request: RoutingRequest, name: str) -> None:
        sent = self._sent.setdefault(name, OrderedDict())
        for key, _ in request.parts:
            self._holders.setdefault(key, {})[name] = None
            sent[key] = None
            sent.move_to_end(key)
            if len(sent) > KNOWN_PARTS:
                self._forget(sent.popitem(last=False)[0], name)
        self._seen = min(self._seen + 1, MEAN_OF)
        self._mean_tokens += (sum(part.tokens for part in request.parts) - self._mean_tokens) / self._seen
        self._recent.append(name)
        self._recent_counts[name] += 1
        while len(self._recent) > WINDOW * self._replicas:
            self._recent_counts[self._recent.popleft()] -= 1

    def removed(self, name: str) -> None:
        for key in self._sent.pop(name, ()):
            self._forget(key, name)
        self._recent = deque(other for other in self._recent if other != name)
        del self._recent_counts[name]

    def _held(self, request: RoutingRequest, names: tuple[str, ...]) -> tuple[Counter[str], Counter[str]]:
        """Tokens of the request by the replicas that probably hold them, and tokens that none holds by their homes."""
        held: Counter[str] = Counter()
        homed: Counter[str] = Counter()
        for key, tokens in request.parts:
            holders = self._holders.get(key)
            for name in holders or homes(key, names):
                (held if holders else homed)[name] += tokens
        return held, homed

    def _forget(self, key: str, name: str) -> None:
        holders = self._holders.get(key, {})
        holders.pop(name, None)
        if not holders:
            self._holders.pop(key, None)


def limit(total: int, replicas: int, factor: float) -> int:
    """The most requests a replica may have, this one included: `factor` times the mean, rounded up."""
    return ceil(factor * (total + 1) / max(1, replicas))


@lru_cache(maxsize=1 << 17)
def homes(key: str, names: tuple[str, ...]) -> list[str]:
    """The two replicas of the highest weight for `key` (rendezvous hash): when one leaves, only its own keys move.

    Two choices spread load that one hash would concentrate.
    """
    seed = _digest(key)
    return nlargest(2, names, key=lambda name: _mixed(seed ^ _digest(name)))


@lru_cache(maxsize=1 << 12)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(value: int) -> int:
    """The 64-bit finaliser of splitmix64: every bit of the argument changes about half of the bits of the result."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


ROUTERS: dict[str, type[Router]] = {router.name: router for router in (RoundRobinRouter, ChunkAwareRouter)}


def make_router(name: str) -> Router:
    """A new router by its registered name; raises `ConfigError` for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"Unknown router {name!r}. Known: {', '.join(sorted(ROUTERS))}.")
    return ROUTERS[name]()
