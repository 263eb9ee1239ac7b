"""Finds known texts in a longer one, character by character: `passage_matcher.py` gives it letters and digits alone.

A table says of each window of 16 characters, by a hash, whether a known text may begin so. Where one may, the texts
that begin so are compared themselves. So a hash collision costs time and never gives a false match.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

WINDOW = 16  # Texts of fewer characters are not matched, because reusing a few tokens gains nothing.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_SLOT_BITS = 20  # The table has 2**20 slots: with 10,000 known texts one window of 100 is looked up in vain.

IsBorder = Callable[[int, int], bool]


class Place(NamedTuple):
    """Where a known text stands."""

    start: int
    text: str


class TextMatcher:
    """Known texts and their positions in a prompt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, list[str]] = {}  # by their first window, sorted
        self._begins = np.zeros(1 << _SLOT_BITS, np.bool_)  # by slot: whether a text begins, or once began, so

    def add(self, texts: Iterable[str]) -> None:
        """Add `texts`. Texts shorter than `WINDOW` are ignored."""
        long = [text for text in texts if len(text) >= WINDOW]
        slots = _slots("".join(text[:WINDOW] for text in long))[::WINDOW]
        with self._lock:
            self._begins[slots] = True
            for text in long:
                alike = self._texts.setdefault(text[:WINDOW], [])
                at = bisect_left(alike, text)
                if alike[at : at + 1] != [text]:
                    alike.insert(at, text)

    def discard(self, texts: Iterable[str]) -> None:
        """Remove `texts`. Unknown texts are ignored."""
        with self._lock:
            for text in texts:
                alike = self._texts.get(text[:WINDOW], [])
                at = bisect_left(alike, text)
                if alike[at : at + 1] == [text]:
                    del alike[at]
                    if not alike:
                        del self._texts[text[:WINDOW]]

    def find(self, prompt: str, is_border: IsBorder) -> list[Place]:
        """The known texts in `prompt`: leftmost first, then longest; no overlaps; never a part of a word.

        `is_border(start, stop)` says whether no word crosses either end.
        """
        if not self._texts:
            return []
        with self._lock:
            return list(self._find(prompt, is_border))

    def _find(self, prompt: str, is_border: IsBorder) -> Iterator[Place]:
        end = 0
        for start in np.flatnonzero(self._begins[_slots(prompt)]).tolist():
            if start >= end and (text := self._longest_at(start, prompt, is_border)) is not None:
                end = start + len(text)
                yield Place(start, text)

    def _longest_at(self, start: int, prompt: str, is_border: IsBorder) -> str | None:
        """The longest of the texts at `start` that is not a part of a word, or `None`."""
        alike, stop = self._texts.get(prompt[start : start + WINDOW], ()), len(prompt)

        def is_behind(text: str) -> bool:
            """Whether `text` is sorted behind the prompt from `start` to `stop`."""
            return text > prompt[start : min(stop, start + len(text))]

        # All texts that begin the prompt here are in front of it, and each of them begins the last one in front.
        while at := bisect_left(alike, True, key=is_behind):
            last = alike[at - 1]
            common = alike_chars(last, prompt[start : min(stop, start + len(last))])
            if common == len(last) and is_border(start, start + common):
                return last
            stop = start + min(common, len(last) - 1)
        return None


def alike_chars(one: Iterable[str], other: Iterable[str]) -> int:
    """How many characters at the beginning of both are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _slots(text: str) -> Any:
    """The slot of every window of `text`, by its start: the upper bits of a polynomial of its characters."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    count = max(0, len(codes) - WINDOW + 1)
    sums = np.zeros(count, np.uint64)
    for shift in range(WINDOW):
        sums = (sums + codes[shift : shift + count]) * _BASE
    return sums >> np.uint64(64 - _SLOT_BITS)
