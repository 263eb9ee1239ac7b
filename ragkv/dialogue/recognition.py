"""Recognition: where a flattened prompt holds, word for word, texts that were ingested as chunks.

Chains flatten their documents into one string before the model sees it. What was a chunk's text is found again in that
string, so that the chunk's own ids stand in the prompt and its stored KV is used. Text is compared, not ids, because a
tokenizer joins what stands at a seam: the ids of a chunk inside a longer text need not be those it has alone.

A rolling hash over the characters (Rabin-Karp, modulo 2**64) gives the hash of every window of 16 characters in one
sweep; windows that begin a known text are looked at more closely: the hash of the whole text first, then the text
itself, character by character. So a hash that collides costs time and never yields a false match. Knows no LangChain,
no model.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW = 16  # characters; shorter texts are not looked for: reusing a few tokens gains nothing
_BASE = 0x9E3779B97F4A7C15 | 1  # odd, so that it has an inverse modulo 2**64
_MERGE_AT = 512  # recent windows before they are sorted in

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Found:
    """A known text in a prompt."""

    start: int  # character offsets
    stop: int
    text: str


class Texts:
    """Known texts, and where they stand in a prompt. Thread-safe; adding and finding are cheap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}  # by the hash of the first window
        self._sorted: Hashes = np.empty(0, np.uint64)  # most of the buckets' hashes
        self._recent: list[int] = []  # the others'

    def add(self, texts: Iterable[str]) -> None:
        """Know `texts` from now on; those shorter than `WINDOW` are left out."""
        with self._lock:
            for text in texts:
                if len(text) < WINDOW:
                    continue
                first = int(_Sums(text[:WINDOW]).hashes(WINDOW)[0])
                if first not in self._buckets:
                    self._buckets[first] = _Bucket()
                    self._recent.append(first)
                self._buckets[first].add(text)
            if len(self._recent) > _MERGE_AT:
                self._sorted = np.sort(np.concatenate((self._sorted, np.array(self._recent, np.uint64))))
                self._recent = []

    def discard(self, texts: Iterable[str]) -> None:
        """Forget `texts`; unknown ones are passed over."""
        with self._lock:
            for text in texts:
                if len(text) < WINDOW:
                    continue
                first = int(_Sums(text[:WINDOW]).hashes(WINDOW)[0])
                if first in self._buckets:
                    self._buckets[first].discard(text)  # an empty bucket stays: it finds nothing

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._buckets.values()))

    def __contains__(self, text: str) -> bool:
        if len(text) < WINDOW:
            return False
        with self._lock:
            bucket = self._buckets.get(int(_Sums(text[:WINDOW]).hashes(WINDOW)[0]))
            return bucket is not None and text in bucket

    def find(self, prompt: str) -> list[Found]:
        """The known texts in `prompt`, leftmost first and longest at a place, none overlapping, none inside a word."""
        if len(prompt) < WINDOW or not self._buckets:
            return []
        with self._lock:
            return list(self._find(prompt, _Sums(prompt)))

    def _find(self, prompt: str, sums: "_Sums") -> Iterator[Found]:
        windows = sums.hashes(WINDOW)
        known = _among(windows, self._sorted)
        if self._recent:
            known |= _among(windows, np.sort(np.array(self._recent, np.uint64)))
        free_from = 0
        for start in np.flatnonzero(known).tolist():
            if start < free_from:
                continue
            text = self._buckets[int(windows[start])].longest_at(start, prompt, sums)
            if text is not None:
                free_from = start + len(text)
                yield Found(start, free_from, text)


class _Bucket:
    """Texts that begin alike."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}
        self._arrays: tuple[list[str], npt.NDArray[np.int64], Hashes] | None = None  # longest first

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, text: str) -> bool:
        return text in self._hashes

    def add(self, text: str) -> None:
        if text not in self._hashes:
            self._hashes[text] = int(_Sums(text).hashes(len(text))[0])
            self._arrays = None

    def discard(self, text: str) -> None:
        if self._hashes.pop(text, None) is not None:
            self._arrays = None

    def longest_at(self, start: int, prompt: str, sums: "_Sums") -> str | None:
        """The longest of the texts that stands at `start` as words of its own."""
        texts, lengths, hashes = self._arrays = self._arrays or self._in_order()
        alike = np.flatnonzero(sums.hashes_at(start, lengths) == hashes)
        for index in alike.tolist():
            if prompt.startswith(texts[index], start) and _whole(prompt, start, start + len(texts[index])):
                return texts[index]
        return None

    def _in_order(self) -> tuple[list[str], npt.NDArray[np.int64], Hashes]:
        texts = sorted(self._hashes, key=len, reverse=True)
        return texts, np.array([len(t) for t in texts], np.int64), np.array([self._hashes[t] for t in texts], np.uint64)


class _Sums:
    """Running sums of a text's characters times powers of the base: the hash of any run of it in one step."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        powers, self._inverses = _powers(len(codes) + 1)
        self._sums: Hashes = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum((codes + np.uint64(1)) * powers[: len(codes)], out=self._sums[1:])

    def hashes(self, length: int) -> Hashes:
        """The hash of every run of `length` characters, by its start."""
        spans = self._sums[length:] - self._sums[: len(self._sums) - length]
        hashes: Hashes = spans * self._inverses[: len(spans)]
        return hashes

    def hashes_at(self, start: int, lengths: npt.NDArray[np.int64]) -> Hashes:
        """The hashes of the runs of these lengths from `start`; a run that ends behind the text is cut."""
        stops = np.minimum(start + lengths, len(self._sums) - 1)
        hashes: Hashes = (self._sums[stops] - self._sums[start]) * self._inverses[start]
        return hashes


_tables_lock = threading.Lock()
_tables: tuple[Hashes, Hashes] = (np.ones(1, np.uint64), np.ones(1, np.uint64))


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """The base's first `count` powers modulo 2**64, and their inverses."""
    global _tables
    with _tables_lock:
        if len(_tables[0]) < count:
            size = max(count, 2 * len(_tables[0]), 1 << 16)
            inverse = pow(_BASE, -1, 1 << 64)
            _tables = (_geometric(_BASE, size), _geometric(inverse, size))
        return _tables


def _geometric(base: int, count: int) -> Hashes:
    factors = np.full(count, base & (2**64 - 1), np.uint64)
    factors[0] = 1
    powers: Hashes = np.multiply.accumulate(factors)
    return powers


def _among(hashes: Hashes, known: Hashes) -> Any:
    """Which of `hashes` are in the ascending `known`."""
    if not len(known):
        return np.zeros(len(hashes), np.bool_)
    places = np.searchsorted(known, hashes)
    places[places == len(known)] = 0
    return known[places] == hashes


def _whole(prompt: str, start: int, stop: int) -> bool:
    """Whether no word runs over either end."""
    before = start > 0 and prompt[start - 1].isalnum() and prompt[start].isalnum()
    behind = stop < len(prompt) and prompt[stop - 1].isalnum() and prompt[stop].isalnum()
    return not (before or behind)
