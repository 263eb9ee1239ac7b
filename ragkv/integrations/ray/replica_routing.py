"""Which replica serves a request: pure functions of what the request reads and how loaded the replicas are.

`chunk-aware` gives every part of a prompt one home by rendezvous hash, and sends a request to the replica that is home
to most of its tokens: requests that share documents meet where their KV is, and when a replica leaves, only its own
parts move. No replica gets more than a bounded share of the requests in progress (consistent hashing with bounded
loads); beyond it the least loaded one serves. Nothing is remembered, so that any number of fronts agree.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from math import ceil
from typing import NamedTuple

from ragkv.errors import ConfigError

LOAD_FACTOR = 1.25  # `LOAD_FACTOR` is how many times the mean of the requests in progress a replica gets at most.


class RoutedPart(NamedTuple):
    """A part of a prompt that may be stored: a chunk, or a conversation's history."""

    key: str
    tokens: int


Parts = tuple[RoutedPart, ...]  # the parts of a request that may be stored
Router = Callable[[Parts, Mapping[str, int]], Sequence[str]]  # ranks replicas, given with their loads: the best first


def chunk_aware() -> Router:
    """The homes of the request's tokens within the load limit, most tokens first, then whoever has the least to do."""

    def rank(parts: Parts, loads: Mapping[str, int]) -> Sequence[str]:
        names, homed = tuple(sorted(loads)), Counter[str]()
        for key, tokens in sorted(parts) if names else ():  # sorted: of equal homes, that of the lowest key comes first
            homed[home(key, names)] += tokens
        most = limit(sum(loads.values()), len(names))
        homes = [name for name, _ in homed.most_common() if loads[name] + 1 <= most]
        return homes + sorted(set(names).difference(homes), key=lambda name: (loads[name], name))

    return rank


def round_robin() -> Router:
    """One replica after another: the baseline."""
    turns = count()

    def rank(_: Parts, loads: Mapping[str, int]) -> Sequence[str]:
        names = sorted(loads)
        first = next(turns) % max(1, len(names))
        return names[first:] + names[:first]

    return rank


def limit(total: int, replicas: int) -> int:
    """The most requests that one of `replicas` may have of `total` and a new one: a multiple of their mean."""
    return ceil(LOAD_FACTOR * (total + 1) / max(1, replicas))


@lru_cache(maxsize=1 << 17)
def home(key: str, names: tuple[str, ...]) -> str:
    """The replica of the highest weight for `key` (rendezvous hash)."""
    return max(names, key=lambda name: hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest())


ROUTERS: dict[str, Callable[[], Router]] = {"chunk-aware": chunk_aware, "round-robin": round_robin}


def make_router(name: str) -> Router:
    """A new router by its registered name; raises `ConfigError` for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"Unknown router {name!r}. Known: {', '.join(sorted(ROUTERS))}.")
    return ROUTERS[name]()
