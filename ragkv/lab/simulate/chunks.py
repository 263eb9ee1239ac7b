"""Chunk entries: a request reads its passages wherever they stand, and each is held whole or not at all.

The policies are the same: each chunk is a group of one block that never grows; capacity and hits are counted in tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragkv.store.policies import NEVER, NextRequest, Policy, TurnSize
from ragkv.store.policies.prefix_tier import PrefixTier

from .ragpulse import RagRequest

OnEvict = Callable[[str], None]


class Read(NamedTuple):
    """One chunk of one request."""

    at: float
    key: str
    tokens: int


@dataclass(frozen=True)
class ChunkReplay:
    """The result of one policy on a list of reads at one capacity."""

    policy: str
    capacity_tokens: int
    reads: int
    hits: int
    tokens: int
    hit_tokens: int


def futures(reads: Sequence[Read]) -> list[NextRequest]:
    """For each read, when its chunk is read next."""
    nexts: dict[str, NextRequest] = {}
    found = []
    for position in range(len(reads) - 1, -1, -1):
        key = reads[position].key
        found.append(nexts.get(key, NEVER))
        nexts[key] = NextRequest(position, 1, 1)
    return found[::-1]


def replay_chunks(
    reads: Sequence[Read], policy: Policy, capacity_tokens: int, *, on_evict: OnEvict | None = None
) -> ChunkReplay:
    """Run reads through `policy`. A chunk that is not found is computed and put, but the policy may drop it at once."""
    tier = ChunkTier(policy, capacity_tokens, on_evict)
    nexts = futures(reads) if policy.needs_future else [None] * len(reads)
    found = [tier.read(read, number, then) for number, (read, then) in enumerate(zip(reads, nexts, strict=True))]
    hit_tokens = sum(read.tokens for read, hit in zip(reads, found, strict=True) if hit)
    tokens = sum(read.tokens for read in reads)
    return ChunkReplay(policy.name, capacity_tokens, len(reads), sum(found), tokens, hit_tokens)


class ChunkTier:
    """A bounded tier that holds chunks, each whole or not at all."""

    def __init__(self, policy: Policy, capacity_tokens: int, on_evict: OnEvict | None = None) -> None:
        self._policy = policy
        self._tier = PrefixTier(policy, capacity_tokens, self._evicted, whole=True)
        self._on_evict = on_evict
        self._put = ""  # the chunk that is put now: if the policy drops it at once, it was not evicted

    def read(self, read: Read, number: int = 0, then: NextRequest | None = None) -> bool:
        """Whether the chunk is held; if not it is put, unless the policy drops it. `then`: its next read, if known."""
        at, key, tokens = read
        policy = self._policy
        found = key in self._tier.held
        if found:
            policy.used(key, at)
        if then is not None:
            policy.served(TurnSize(at, number, key, 1, 1, 1, 1, None, then))
            if any(cut.group == key and not cut.keep for cut in policy.trims(False, at)):  # never read again
                if found:
                    self._evicted(key, self._tier.drop(key, at))
                return found
        if not found and tokens <= self._tier.capacity:
            self._put = key
            self._tier.hold(key, 1, tokens, at)
            self._put = ""
        return found

    def _evicted(self, key: str, tokens: int) -> None:
        if self._on_evict is not None and key != self._put:
            self._on_evict(key)


# These parts are worth an entry; the others are a user's own words.
STORED = frozenset({"sys_prompt", "passages_ids", "web_search"})


def position_free(requests: Iterable[RagRequest]) -> list[Read]:
    """One read for each stored part, which is found wherever it stood before."""
    return [
        Read(request.at, f"{part.kind}:{part.number}", part.tokens)
        for request in requests
        for part in request.parts
        if part.kind in STORED
    ]
