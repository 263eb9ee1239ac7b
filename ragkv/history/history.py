"""A conversation's history as values: runs of tokens that have KV, a tail that has none yet, and what each run was.

A block is position-free and never changes; an edit (truncation, a discarded range) changes the list alone
(CachedAttention section 3.4). A block's context says what it saw. Where that is what stands before it in a prompt, the
block is exact there, whoever made it; KV that saw an approximation has a random taint in its context, so that only its
own session, or a fork of it, finds it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from ragkv.store import Identity, ids_bytes

Ranges = Sequence[tuple[int, int]]  # start, stop of token indices; ascending, apart, not empty


class PartKind(Enum):
    """What a run of a past turn was."""

    CHUNK = "chunk"  # a document, or text around documents
    QUESTION = "question"  # with the template's run behind it
    ANSWER = "answer"
    BETWEEN = "between"  # the template's runs between an answer and the next question


@dataclass(frozen=True, slots=True)
class Part:
    """A run of history tokens, in order."""

    kind: PartKind
    tokens: int
    turn: int = 0  # 0 is the conversation's first
    source: str = ""  # of a chunk: its document

    def __len__(self) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a history that has KV: the tokens start ... stop - 1 of a stored entry."""

    context: str  # of its entry's identity: what it saw
    behind: str  # digest of the prefix it saw
    frequencies: str  # digest of the RoPE frequencies it was made under
    token_ids: tuple[int, ...]  # of the whole entry
    index: int  # number in its session, the order in which a policy trims
    start: int
    stop: int
    rotated_from: int | None = None  # naive truncation only: where its first kept key was rotated to before

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def kept_ids(self) -> tuple[int, ...]:
        """The ids it still stands for."""
        return self.token_ids[self.start : self.stop]

    def identity(self, base: Identity) -> Identity:
        """The identity of its entry; `base` is the engine's."""
        return replace(base, context=self.context)

    def key(self, base: Identity) -> str:
        """The key of its entry."""
        return self.identity(base).key(self.token_ids)


@dataclass(frozen=True, slots=True)
class History:
    """Everything a turn stands behind, without the application's prefix."""

    blocks: tuple[Block, ...] = ()
    tail: tuple[int, ...] = ()  # ids behind the blocks without KV: the next turn computes them
    parts: tuple[Part, ...] = ()  # the same tokens by what they were

    def __len__(self) -> int:
        return sum(map(len, self.blocks)) + len(self.tail)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids, in order."""
        return tuple(chain(*(block.kept_ids for block in self.blocks), self.tail))

    @property
    def next_index(self) -> int:
        """The number of the block that comes next."""
        return 1 + max((block.index for block in self.blocks), default=-1)

    def without(self, ranges: Ranges, mode: str, prefix_tokens: int) -> "History":
        """What is left without these token ranges.

        "kv": the KV of the rest is kept and turned to its new places; "tokens": it is dropped (token truncation);
        "naive": it is kept as it was turned before, which is wrong (NKVT).
        """
        kept = list(_between(ranges, len(self)))
        blocks, at = [], 0
        for block in self.blocks:
            for start, stop in _within(kept, at, at + len(block)):
                turned = prefix_tokens + at if block.rotated_from is None else block.rotated_from
                place = turned + start - at if mode == "naive" else None
                offset = block.start - at
                blocks.append(replace(block, start=start + offset, stop=stop + offset, rotated_from=place))
            at += len(block)
        tail = tuple(chain(*(self.tail[start - at : stop - at] for start, stop in _within(kept, at, len(self)))))
        parts, at = [], 0
        for part in self.parts:
            if left := sum(stop - start for start, stop in _within(kept, at, at + len(part))):
                parts.append(replace(part, tokens=left))
            at += len(part)
        cut = History(tuple(blocks), tail, tuple(parts))
        return History((), cut.token_ids, cut.parts) if mode == "tokens" else cut


EMPTY = History()


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn that was answered."""

    began: History  # what it stood behind, before anything was dropped for it: what `rewind` goes back to
    at: float  # when it ended, seconds since the epoch


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that is known of a session."""

    turns: tuple[PastTurn, ...] = ()
    history: History = EMPTY  # what the next turn stands behind
    created_at: float = 0.0  # seconds since the epoch
    used_at: float = 0.0
    ttl_s: float | None = None  # its own; None: the setting's


class Chain:
    """What a run of tokens saw, as the contexts of the blocks along it."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self._seen = hashlib.blake2b(ids_bytes(prefix), digest_size=16, person=b"ragkv-history")

    def saw(self, token_ids: Sequence[int]) -> None:
        """These come next."""
        self._seen.update(ids_bytes(token_ids))

    def context(self, frequencies: str, taint: str = "") -> str:
        """The context of what comes now; `taint` is random where something before it was not exact."""
        whole = f"{self._seen.hexdigest()} {frequencies} {taint}"
        return hashlib.blake2b(whole.encode(), digest_size=16, person=b"ragkv-history").hexdigest()


def _between(ranges: Ranges, length: int) -> Iterator[tuple[int, int]]:
    """What of 0 ... length - 1 lies between the ranges."""
    at = 0
    for start, stop in (*ranges, (length, length)):
        if at < start:
            yield at, start
        at = max(at, stop)


def _within(ranges: Ranges, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The ranges as far as they lie in low ... high - 1."""
    for start, stop in ranges:
        if max(start, low) < min(stop, high):
            yield max(start, low), min(stop, high)


__all__ = ["EMPTY", "Block", "Chain", "Conversation", "History", "Part", "PartKind", "PastTurn", "Ranges"]
