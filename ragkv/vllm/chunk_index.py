"""Finds stored chunks in prompts by their token ids.

A tokenizer may merge a chunk's last tokens with the following text, such as a full stop with an
empty line. It may also merge the first token with the space before it. So a chunk is also found
without these tokens. Missing last tokens change nothing, because a token's KV depends on no later
token. If the first token differs, the chunk is fused, as it is at any place except right after the
prefix.
"""

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragkv.types import Chunk, Excerpt

log = logging.getLogger(__name__)

# By how many first tokens a chunk is looked up; shorter ones are not found.
HEAD_TOKENS = 8
# The last tokens of a chunk that a tokenizer may merge with the text behind it.
MERGED_TOKENS = 2
SHARE_OF_TIME = 0.05  # the share of the time for reading the store's list


@dataclass(frozen=True, slots=True, order=True)
class Occurrence:
    """The positions start ... stop - 1 of a prompt, which are one chunk or a part of one."""

    start: int
    stop: int
    # the ids of the chunk of which it is a part; (): it is the whole one
    whole: tuple[int, ...] = ()
    offset: int = 0  # how many of them stand before it

    def chunk(self, token_ids: tuple[int, ...]) -> Chunk:
        """The chunk in the prompt `token_ids` (S,)."""
        ids = token_ids[self.start : self.stop]
        return Excerpt(ids, whole=self.whole, offset=self.offset) if self.whole else Chunk(ids)


class ChunkIndex:
    """The chunks that are stored on this machine, read anew when they are searched and the list is
    old.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[int, ...]]], refresh_s: float) -> None:
        """`read` lists the token ids of all stored chunks."""
        self._read = read
        self._refresh_s = refresh_s
        self._by_head: _ByHead = {}
        self._by_second: _ByHead = {}  # the same by their tokens from the second on
        self._count = 0
        self._next_read = 0.0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        self._refresh()
        return self._count

    def find(self, token_ids: Sequence[int]) -> list[Occurrence]:
        """The chunks in `token_ids` (S,), from left to right; where several begin, the longest.
        They do not overlap.
        """
        self._refresh()
        ids = tuple(token_ids)
        found = list[Occurrence]()
        at = 0
        while at + HEAD_TOKENS <= len(ids):
            one = self._at(ids, at)
            if one is not None:
                found.append(one)
            at = at + 1 if one is None else one.stop
        return found

    def _at(self, ids: tuple[int, ...], at: int) -> Occurrence | None:
        """The chunk that begins at `at`, with its first token or without it."""
        head = ids[at : at + HEAD_TOKENS]
        for offset, by_head in enumerate((self._by_head, self._by_second)):
            for whole in by_head.get(head, ()):
                length = len(whole) - offset
                for tokens in range(length, max(HEAD_TOKENS, length - MERGED_TOKENS) - 1, -1):
                    if ids[at : at + tokens] == whole[offset : offset + tokens]:
                        is_whole = tokens == len(whole)
                        return Occurrence(at, at + tokens, () if is_whole else whole, offset)
        return None

    def _refresh(self) -> None:
        with self._lock:
            if (began := time.monotonic()) < self._next_read:
                return
            by_head = _ByHead()
            by_second = _ByHead()
            count = 0
            try:
                for chunk in (ids for ids in self._read() if len(ids) >= HEAD_TOKENS):
                    _add(by_head, chunk[:HEAD_TOKENS], chunk)
                    if len(chunk) > HEAD_TOKENS:
                        _add(by_second, chunk[1 : HEAD_TOKENS + 1], chunk)
                    count += 1
                self._by_head = by_head
                self._by_second = by_second
                self._count = count
            except Exception:
                log.exception("The list of stored chunks cannot be read; the last one is used.")
            took_s = time.monotonic() - began
            self._next_read = began + max(self._refresh_s, took_s / SHARE_OF_TIME)


# token ids by some of their first ones, the longest first
_ByHead = dict[tuple[int, ...], list[tuple[int, ...]]]


def _add(by_head: _ByHead, head: tuple[int, ...], ids: tuple[int, ...]) -> None:
    bisect.insort(by_head.setdefault(head, []), ids, key=lambda known: -len(known))
