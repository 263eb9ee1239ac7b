"""Chunk entries: a request reads its passages wherever they stand, and each is held whole or not at all.

The same policies, each chunk a group of one block that never grows; capacity and hits are counted in tokens. Two other
readings of the same requests stand beside it: exact-prefix reuse, where a chunk counts only if all before it is equal,
and that with passages put in canonical order first.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from ragkv.store.policies import NEVER, NextRequest, Policy, Turn

from .readers.ragpulse import PARTS, Part, RagRequest

OnEvict = Callable[[str], None]


class Read(NamedTuple):
    """One chunk of one request."""

    at: float
    key: str
    tokens: int


@dataclass(frozen=True)
class ChunkReplay:
    """What one policy made of the reads at one capacity."""

    policy: str
    capacity_tokens: int
    reads: int
    hits: int
    tokens: int
    hit_tokens: int


def futures(reads: Sequence[Read]) -> list[NextRequest]:
    """When each read's chunk is read next."""
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
    """Run reads through `policy`. A chunk that was not found is computed and put; the policy may rather drop it."""
    tier = ChunkTier(policy, capacity_tokens, on_evict)
    nexts = futures(reads) if policy.needs_future else [None] * len(reads)
    found = [tier.read(read, number, then) for number, (read, then) in enumerate(zip(reads, nexts, strict=True))]
    hit_tokens = sum(read.tokens for read, hit in zip(reads, found, strict=True) if hit)
    tokens = sum(read.tokens for read in reads)
    return ChunkReplay(policy.name, capacity_tokens, len(reads), sum(found), tokens, hit_tokens)


class ChunkTier:
    """A bounded tier: chunks held, each whole or not at all."""

    def __init__(self, policy: Policy, capacity_tokens: int, on_evict: OnEvict | None = None) -> None:
        self.held: dict[str, int] = {}
        self.used = 0
        self._policy = policy
        self._capacity = capacity_tokens
        self._on_evict = on_evict

    def read(self, read: Read, number: int = 0, then: NextRequest | None = None) -> bool:
        """Whether the chunk is held; if not it is put, unless the policy rather drops it. `then`: its next read."""
        at, key, tokens = read
        policy = self._policy
        found = key in self.held
        if found:
            policy.used(key, at)
        if then is not None:
            policy.served(Turn(at, number, key, 1, 1, 1, 1, None, then))
            if any(cut.group == key and not cut.keep for cut in policy.trims(False, at)):  # never read again
                if found:
                    self._drop(key, at)
                    self._tell(key)
                return found
        if not found and tokens <= self._capacity:
            self._put(key, tokens, at)
        return found

    def _put(self, key: str, tokens: int, at: float) -> None:
        self.held[key] = tokens
        self.used += tokens
        self._policy.held(key, 1, tokens, at)
        while self.used > self._capacity:
            cut = self._policy.victim((), at)
            assert cut is not None and cut.group in self.held
            self._drop(cut.group, at)
            if cut.group != key:
                self._tell(cut.group)

    def _drop(self, key: str, at: float) -> None:
        self.used -= self.held.pop(key)
        self._policy.held(key, 0, 0, at)

    def _tell(self, key: str) -> None:
        if self._on_evict is not None:
            self._on_evict(key)


STORED = frozenset({"sys_prompt", "passages_ids", "web_search"})  # parts worth an entry: others are a user's own words


def position_free(requests: Iterable[RagRequest], kinds: Container[str] = STORED) -> list[Read]:
    """A read for each stored part, found wherever it stood before."""
    return [
        Read(request.at, f"{part.kind}:{part.number}", part.tokens)
        for request in requests
        for part in request.parts
        if part.kind in kinds
    ]


def exact_prefix(
    requests: Iterable[RagRequest], *, canonical: bool = False, kinds: Container[str] = STORED
) -> list[Read]:
    """A read for each stored part by everything up to and with it; `canonical`: passages sorted by number first.

    The last part of a prompt is read first, so that its prefix is always younger and a part never outlives what it
    stands on under LRU. What follows the first part that is not stored is no stored prefix.
    """
    reads: list[Read] = []
    for request in requests:
        chain: list[Read] = []
        key = ""
        for part in _in_order(request.parts, canonical):
            if part.kind not in kinds:
                break
            key = blake2b(f"{key}/{part.kind}:{part.number}".encode(), digest_size=12).hexdigest()
            chain.append(Read(request.at, key, part.tokens))
        reads += reversed(chain)
    return reads


def _in_order(parts: Sequence[Part], canonical: bool) -> list[Part]:
    """Parts as they stand, or with the passages, which stand together, by number."""
    kinds = list(PARTS)
    if not canonical:
        return list(parts)
    return sorted(parts, key=lambda part: (kinds.index(part.kind), part.kind == "passages_ids" and part.number))
