"""Finds the texts of known chunks, word for word, in a rendered prompt.

Chains join their documents into one string before the model sees it. If a chunk's text is found in that string, the
chunk's own token ids are put into the prompt and its stored KV is used. The matcher compares text and not ids, because
a tokenizer merges characters across a seam: inside a longer text a chunk can have other ids than alone.

A rolling hash over the characters (Rabin-Karp, modulo 2**64) gives the hash of every window of 16 characters in one
pass. For each window that begins a known text, first the hash of the whole text is compared, then the text itself. So a
hash collision costs time and never gives a false match. The matcher knows no LangChain and no model.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

WINDOW = 16  # Texts of fewer characters are not matched, because reusing a few tokens gains nothing.
_BASE = 0x9E3779B97F4A7C15  # The base is odd, so that it has an inverse modulo 2**64.
_INVERSE = pow(_BASE, -1, 1 << 64)
_MERGE_AT = 512  # So many recent hashes are merged into the sorted array at once.

Hashes = npt.NDArray[np.uint64]
IsBorder = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A known text in a prompt."""

    start: int  # character offsets
    stop: int
    text: str
    key: str | None = None  # the letters and digits of a passage that was found by them alone
    word_for_word: bool = True  # whether the prompt has exactly the known text


class TextMatcher:
    """Known texts and their positions in a prompt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, _Bucket] = {}  # by the hash of the first window of the texts
        self._sorted: Hashes = np.empty(0, np.uint64)  # the keys of `_buckets` at the last merge
        self._recent: list[int] = []  # the keys added since

    def add(self, texts: Iterable[str]) -> None:
        """Add `texts`. Texts shorter than `WINDOW` are ignored."""
        with self._lock:
            for text in texts:
                if len(text) < WINDOW:
                    continue
                first = _hash(text[:WINDOW])
                if first not in self._buckets:
                    self._buckets[first] = _Bucket()
                    self._recent.append(first)
                self._buckets[first].add(text)
            if len(self._recent) > _MERGE_AT:
                self._sorted = np.sort(np.fromiter(self._buckets, np.uint64, len(self._buckets)))
                self._recent = []

    def discard(self, texts: Iterable[str]) -> None:
        """Remove `texts`. Unknown texts are ignored."""
        with self._lock:
            for text in texts:
                if len(text) < WINDOW:
                    continue
                first = _hash(text[:WINDOW])
                bucket = self._buckets.get(first)
                if bucket is not None and bucket.discard(text):
                    del self._buckets[first]  # the next merge removes its key from `_sorted`

    def find(self, prompt: str, is_border: IsBorder | None = None) -> list[TextMatch]:
        """The known texts in `prompt`: leftmost first, then longest; no overlaps; never a part of a word.

        `is_border(start, stop)` says whether no word crosses either end; left out: as `prompt` says itself.
        """
        if len(prompt) < WINDOW or not self._buckets:
            return []
        with self._lock:
            return list(self._find(prompt, _Sums(prompt), is_border or partial(_at_word_borders, prompt)))

    def _find(self, prompt: str, sums: "_Sums", is_border: IsBorder) -> Iterator[TextMatch]:
        windows = sums.hashes(WINDOW)
        known = _is_in(windows, self._sorted)
        if self._recent:
            known |= _is_in(windows, np.sort(np.array(self._recent, np.uint64)))
        end = 0
        for start in np.flatnonzero(known).tolist():
            if start < end:
                continue
            bucket = self._buckets.get(int(windows[start]))
            text = None if bucket is None else bucket.longest_at(start, prompt, sums, is_border)
            if text is not None:
                end = start + len(text)
                yield TextMatch(start, end, text)


class _Bucket:
    """Texts with the same first window."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}
        self._arrays: tuple[list[str], npt.NDArray[np.int64], Hashes] | None = None  # longest first

    def add(self, text: str) -> None:
        if text not in self._hashes:
            self._hashes[text] = _hash(text)
            self._arrays = None

    def discard(self, text: str) -> bool:
        """Remove `text`, if it is there. Returns whether the bucket is empty."""
        if self._hashes.pop(text, None) is not None:
            self._arrays = None
        return not self._hashes

    def longest_at(self, start: int, prompt: str, sums: "_Sums", is_border: IsBorder) -> str | None:
        """The longest of the texts at `start` that is not a part of a word, or `None`."""
        texts, lengths, hashes = self._arrays = self._arrays or self._sorted_arrays()
        alike = np.flatnonzero(sums.hashes_at(start, lengths) == hashes)
        for index in alike.tolist():
            if prompt.startswith(texts[index], start) and is_border(start, start + len(texts[index])):
                return texts[index]
        return None

    def _sorted_arrays(self) -> tuple[list[str], npt.NDArray[np.int64], Hashes]:
        texts = sorted(self._hashes, key=len, reverse=True)
        return texts, np.array([len(t) for t in texts], np.int64), np.array([self._hashes[t] for t in texts], np.uint64)


class _Sums:
    """Prefix sums of characters times powers of the base: they give the hash of any substring in one step."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        self._inverses = _powers(_INVERSE, len(codes) + 1)
        self._sums: Hashes = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum((codes + np.uint64(1)) * _powers(_BASE, len(codes) + 1)[:-1], out=self._sums[1:])

    def hashes(self, length: int) -> Hashes:
        """The hash of every substring of `length` characters, by its start."""
        spans = self._sums[length:] - self._sums[: len(self._sums) - length]
        hashes: Hashes = spans * self._inverses[: len(spans)]
        return hashes

    def hashes_at(self, start: int, lengths: npt.NDArray[np.int64]) -> Hashes:
        """The hashes of the substrings of these lengths at `start`, each cut at the end of the text."""
        stops = np.minimum(start + lengths, len(self._sums) - 1)
        hashes: Hashes = (self._sums[stops] - self._sums[start]) * self._inverses[start]
        return hashes


def _hash(text: str) -> int:
    return int(_Sums(text).hashes(len(text))[0])


def _powers(base: int, count: int) -> Hashes:
    """The first `count` powers of the base modulo 2**64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    powers: Hashes = np.multiply.accumulate(factors)
    return powers


def _is_in(hashes: Hashes, known: Hashes) -> Any:
    """A mask of the `hashes` that are in the sorted `known`."""
    if not len(known):
        return np.zeros(len(hashes), np.bool_)
    places = np.searchsorted(known, hashes)
    places[places == len(known)] = 0
    return known[places] == hashes


def _at_word_borders(prompt: str, start: int, stop: int) -> bool:
    """Whether no word crosses either end of `prompt[start:stop]`."""
    before = start > 0 and prompt[start - 1].isalnum() and prompt[start].isalnum()
    after = stop < len(prompt) and prompt[stop - 1].isalnum() and prompt[stop].isalnum()
    return not (before or after)
