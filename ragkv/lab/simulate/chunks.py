"""Chunk entries: a request reads its passages wherever they stand, and each is held whole or not at all.

The policies are the same: each chunk is a group of one block that never grows; capacity and hits are counted in tokens.
Two other ways to reuse the same requests serve as comparison: exact-prefix reuse, where a chunk counts only if all
before it is equal, and the same with passages put in canonical order first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from ragkv.store.policies import NEVER, NextRequest, Policy, TurnSize

from .readers.ragpulse import PARTS, PromptPart, RagRequest

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
        self.held: dict[str, int] = {}
        self._used = 0
        self._policy = policy
        self._capacity = capacity_tokens
        self._on_evict = on_evict

    def read(self, read: Read, number: int = 0, then: NextRequest | None = None) -> bool:
        """Whether the chunk is held; if not it is put, unless the policy drops it. `then`: its next read, if known."""
        at, key, tokens = read
        policy = self._policy
        found = key in self.held
        if found:
            policy.used(key, at)
        if then is not None:
            policy.served(TurnSize(at, number, key, 1, 1, 1, 1, None, then))
            if any(cut.group == key and not cut.keep for cut in policy.trims(False, at)):  # never read again
                if found:
                    self._drop(key, at, evicted=True)
                return found
        if not found and tokens <= self._capacity:
            self._put(key, tokens, at)
        return found

    def _put(self, key: str, tokens: int, at: float) -> None:
        self.held[key] = tokens
        self._used += tokens
        self._policy.held(key, 1, tokens, at)
        while self._used > self._capacity:
            cut = self._policy.victim((), at)
            assert cut is not None and cut.group in self.held
            self._drop(cut.group, at, evicted=cut.group != key)

    def _drop(self, key: str, at: float, evicted: bool) -> None:
        self._used -= self.held.pop(key)
        self._policy.held(key, 0, 0, at)
        if evicted and self._on_evict is not None:
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


def exact_prefix(requests: Iterable[RagRequest], *, canonical: bool = False) -> list[Read]:
    """One read for each stored part, keyed by itself and all before it; `canonical`: passages sorted by number first.

    The last part of a prompt is read first: then its prefix was always used later, so that under LRU a part never
    outlives its prefix. Parts behind the first one that is not stored belong to no stored prefix.
    """
    reads: list[Read] = []
    for request in requests:
        chain: list[Read] = []
        key = ""
        for part in _in_order(request.parts, canonical):
            if part.kind not in STORED:
                break
            key = blake2b(f"{key}/{part.kind}:{part.number}".encode(), digest_size=12).hexdigest()
            chain.append(Read(request.at, key, part.tokens))
        reads += reversed(chain)
    return reads


def _in_order(parts: Sequence[PromptPart], canonical: bool) -> list[PromptPart]:
    """Parts as they stand, or with the passages, which are adjacent, sorted by number."""
    kinds = list(PARTS)
    if not canonical:
        return list(parts)
    return sorted(parts, key=lambda part: (kinds.index(part.kind), part.kind == "passages_ids" and part.number))
