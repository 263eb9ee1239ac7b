"""Finds stored chunks in prompts by their token ids."""

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragkv.runtime import Closing

log = logging.getLogger(__name__)

HEAD_TOKENS = 8  # `HEAD_TOKENS` is by how many first tokens a chunk is looked up; shorter ones are not found.
MOST_CHUNKS = 1_000_000  # `MOST_CHUNKS` is how many chunks are known at a time.
SHARE_OF_TIME = 0.05  # `SHARE_OF_TIME` is the share of a thread's time for reading the store's list.


@dataclass(frozen=True, slots=True, order=True)
class Occurrence:
    """The positions start ... stop - 1 of a prompt, which are one chunk."""

    start: int
    stop: int


class ChunkIndex(Closing):
    """The chunks that are stored on this machine, kept up to date by a thread of its own."""

    def __init__(self, read: Callable[[], Iterable[tuple[int, ...]]], refresh_s: float) -> None:
        """`read` lists the token ids of all stored chunks. It is called once now, and then again and again."""
        self._read, self._refresh_s = read, refresh_s
        self._by_head: _ByHead = {}
        self._by_inner_head: _ByHead = {}  # chunks without their first and last tokens
        self._count = 0
        self._closing = threading.Event()
        self.refresh()
        self._thread = threading.Thread(target=self._work, name="ragkv-chunks", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self._count

    def find(self, token_ids: Sequence[int]) -> list[Occurrence]:
        """The chunks in `token_ids` (S,), from left to right; where several begin, the longest. They do not overlap."""
        return _occurrences(self._by_head, tuple(token_ids))

    def merged(self, token_ids: Sequence[int]) -> int:
        """How many chunks stand in `token_ids` (S,), none of which `find` finds, without their first and last tokens.

        The tokenizer merges such a token with the text around the chunk, for example with another separator.
        """
        return len(_occurrences(self._by_inner_head, tuple(token_ids)))

    def refresh(self) -> None:
        """Read the list of stored chunks now."""
        by_head, by_inner_head = _ByHead(), _ByHead()
        count = 0
        for chunk in self._read():
            if len(chunk) >= HEAD_TOKENS and count < MOST_CHUNKS:
                _add(by_head, chunk)
                if len(chunk) >= HEAD_TOKENS + 2:
                    _add(by_inner_head, chunk[1:-1])
                count += 1
        self._by_head, self._by_inner_head, self._count = by_head, by_inner_head, count

    def close(self) -> None:
        """Stop the thread. Safe to call twice."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        pause_s = self._refresh_s
        while not self._closing.wait(pause_s):
            began = time.perf_counter()
            try:
                self.refresh()
            except Exception:
                log.exception("The list of stored chunks cannot be read; the last one is used.")
            pause_s = max(self._refresh_s, (time.perf_counter() - began) / SHARE_OF_TIME)


_ByHead = dict[tuple[int, ...], list[tuple[int, ...]]]  # token ids by their first ones, the longest first


def _add(by_head: _ByHead, ids: tuple[int, ...]) -> None:
    bisect.insort(by_head.setdefault(ids[:HEAD_TOKENS], []), ids, key=lambda known: -len(known))


def _occurrences(by_head: _ByHead, ids: tuple[int, ...]) -> list[Occurrence]:
    found, at = list[Occurrence](), 0
    while at + HEAD_TOKENS <= len(ids):
        for known in by_head.get(ids[at : at + HEAD_TOKENS], ()):
            if ids[at : at + len(known)] == known:
                found.append(Occurrence(at, at + len(known)))
                break
        at = found[-1].stop if found and found[-1].start == at else at + 1
    return found


__all__ = ["ChunkIndex", "Occurrence"]
