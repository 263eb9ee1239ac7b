"""A conversation's history as values: blocks of tokens with KV, a tail of tokens without, and parts
by kind.

A block is position-free and never changes. An edit (truncation, a discarded range) changes only the
list of blocks (CachedAttention section 3.4). A block's `seen_digest` is of all tokens before it.
So a block of any conversation is exact in a prompt that has the same tokens in front of it. If
those tokens had approximate KV, the digest also has a random taint. Then only the block's own
session, or a fork of it, finds the block.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from ragkv.store.entry import EntryKey, Identity, ids_bytes

Ranges = Sequence[tuple[int, int]]  # start, stop of token indices; ascending, disjoint, not empty


class PartKind(Enum):
    """What a run of tokens of a past turn was."""

    CHUNK = "chunk"  # a document, or text around documents
    QUESTION = "question"  # with the template's tokens behind it
    ANSWER = "answer"
    BETWEEN = "between"  # the template's tokens between an answer and the next question


@dataclass(frozen=True, slots=True)
class Part:
    """A run of history tokens of one kind."""

    kind: PartKind
    tokens: int
    turn: int = 0  # 0 is the conversation's first turn

    def __len__(self) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Block:
    """A run of a history that has KV: the tokens start ... stop - 1 of a stored entry."""

    seen_digest: str  # of its entry's identity: a digest of all it saw
    prefix_digest: str  # of the application's prefix that it saw
    rope_digest: str  # digest of the RoPE frequencies it was made with
    token_ids: tuple[int, ...]  # of the whole entry
    index: int  # number in its session, the order in which a policy evicts a session's blocks
    start: int
    stop: int
    # Its turn reused chunks inexactly, so the next question may choose other tokens of it to
    # recompute.
    fused: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def kept_ids(self) -> tuple[int, ...]:
        """The ids of the tokens start ... stop - 1."""
        return self.token_ids[self.start : self.stop]

    def identity(self, base: Identity) -> Identity:
        """The identity of its entry; `base` is the engine's."""
        return replace(base, seen_digest=self.seen_digest, neutral="")

    def key(self, base: Identity) -> EntryKey:
        """The key of its entry."""
        return self.identity(base).key(self.token_ids)


@dataclass(frozen=True, slots=True)
class History:
    """All tokens that a turn builds on, without the application's prefix."""

    blocks: tuple[Block, ...] = ()
    tail: tuple[int, ...] = ()  # ids behind the blocks that have no KV: the next turn computes them
    parts: tuple[Part, ...] = ()  # the same tokens, by kind

    def __len__(self) -> int:
        return sum(map(len, self.blocks)) + len(self.tail)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids, in order."""
        return tuple(chain(*(block.kept_ids for block in self.blocks), self.tail))

    @property
    def next_index(self) -> int:
        """The number of the next block."""
        return 1 + max((block.index for block in self.blocks), default=-1)

    def without(self, ranges: Ranges) -> "History":
        """This history without these token ranges; KV that is kept is rotated to its new positions
        when it is read.
        """
        kept = list(_gaps(ranges, len(self)))
        blocks = []
        at = 0
        for block in self.blocks:
            for start, stop in _clipped(kept, at, at + len(block)):
                offset = block.start - at
                blocks.append(replace(block, start=start + offset, stop=stop + offset))
            at += len(block)
        tail = tuple(
            chain(
                *(
                    self.tail[start - at : stop - at]
                    for start, stop in _clipped(kept, at, len(self))
                )
            )
        )
        parts = []
        at = 0
        for part in self.parts:
            if left := sum(stop - start for start, stop in _clipped(kept, at, at + len(part))):
                parts.append(replace(part, tokens=left))
            at += len(part)
        return History(tuple(blocks), tail, tuple(parts))


EMPTY = History()
REWINDABLE = 32  # So many turns can be taken back at most.


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn that was answered."""

    # the history before the turn, before anything was truncated for it; `rewind` restores it.
    # None: more than `REWINDABLE` turns ago
    began: History | None
    at: float  # when the turn ended, seconds since the epoch


def with_turn(turns: tuple[PastTurn, ...], began: History, at: float) -> tuple[PastTurn, ...]:
    """`turns` and one more, of which the last `REWINDABLE` keep their history.

    Each turn saves all of it anew, and histories that were truncated share nothing.
    """
    older = turns[: 1 - REWINDABLE]
    newer = turns[1 - REWINDABLE :]
    return (*(replace(turn, began=None) for turn in older), *newer, PastTurn(began, at))


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a conversation is at one moment."""

    turns: tuple[PastTurn, ...] = ()
    history: History = EMPTY  # what the next turn builds on
    created_at: float = 0.0  # seconds since the epoch
    used_at: float = 0.0
    ttl_s: float | None = None  # None: the config's
    title: str = ""  # for lists of conversations; "" if it has none


class Chain:
    """A running digest of the tokens so far, which gives each block of a prompt its
    `seen_digest`.
    """

    def __init__(self, prefix: Sequence[int]) -> None:
        self._seen = hashlib.blake2b(ids_bytes(prefix), digest_size=16, person=b"ragkv-history")

    def add(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens."""
        self._seen.update(ids_bytes(token_ids))

    def digest(self, rope_digest: str, taint: str = "") -> str:
        """What the next block has seen; `taint` is a random word if something in front of the
        block is not exact.
        """
        whole = f"{self._seen.hexdigest()} {rope_digest} {taint}"
        return hashlib.blake2b(whole.encode(), digest_size=16, person=b"ragkv-history").hexdigest()


def exact_blocks(
    prefix: Sequence[int], blocks: Sequence[Block], rope_digest: str
) -> Iterator[bool]:
    """Whether each of a history's `blocks` behind `prefix` is exact in a prompt of these RoPE
    frequencies, in order.

    It is if its `seen_digest` proves that it saw the same tokens, where they stand now.
    """
    chain = Chain(prefix)
    for block in blocks:
        yield block.start == 0 and block.seen_digest == chain.digest(rope_digest)
        chain.add(block.kept_ids)


def _gaps(ranges: Ranges, length: int) -> Iterator[tuple[int, int]]:
    """The parts of 0 ... length - 1 that are in no range."""
    at = 0
    for start, stop in (*ranges, (length, length)):
        if at < start:
            yield at, start
        at = max(at, stop)


def _clipped(ranges: Ranges, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of the ranges that are in low ... high - 1."""
    for start, stop in ranges:
        if max(start, low) < min(stop, high):
            yield max(start, low), min(stop, high)
