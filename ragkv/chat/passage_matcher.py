"""Finds known passages in a prompt, even if a template changed how they are written.

Passages and prompt are compared by their words (`runtime/words.py`), so indentation, line breaks,
quoting, punctuation and everything around a passage do not matter. JSON and HTML escapes are read
as the characters that they mean. A match is a *range of the prompt*: the prompt's own text at that
place becomes the chunk. No text of a passage ever replaces text of a prompt. So a wrong match could
only cut the prompt at another place.
"""

import bisect
import hashlib
import html
import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import NamedTuple

from ragkv.runtime.words import Word, words

# Passages with a shorter key are not found, because reusing a few tokens gains nothing.
WINDOW = 16
MAX_FOUND = 256  # passages that are found in one prompt, at most
_ESCAPE = re.compile(
    # a pair of surrogates is one character
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|"
    r"\\(?:u[0-9a-fA-F]{4}|[\"\\/bfnrt])|&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,8});|<br ?/?>"
)


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A known text in a prompt."""

    start: int  # character offsets
    stop: int
    text: str  # as it stands there
    key: str  # its words
    word_for_word: bool  # whether the prompt has exactly the known text


class _Passage(NamedTuple):
    """A known passage."""

    before: str  # what stands before its first word
    after: str  # what stands after its last word
    digest: bytes  # of its text

    def place(self, prompt: str, first: Word, last: Word, free_from: int) -> tuple[int, int]:
        """The range from its first word in a prompt to its last one, with the marks around them
        that it has there, too.
        """
        free = prompt[max(free_from, first.start - len(self.before)) : first.start]
        start = first.start - _alike_chars(reversed(free), reversed(self.before))
        after = prompt[last.end : last.end + len(self.after)]
        return start, last.end + _alike_chars(after, self.after)


def key_of(passage: str) -> str:
    """The words of a passage, each with a line's end: equal for all its writings."""
    return _key(words(passage))


class PassageMatcher:
    """Known passages and their places in a prompt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _Passage] = {}  # by key
        self._alike: dict[str, list[str]] = {}  # keys by their first `WINDOW` characters, sorted
        self.chars = 0  # characters of all keys

    def add(self, passages: Iterable[str]) -> list[str]:
        """Know `passages`; returns their keys. Very short ones are not found."""
        keys = list[str]()
        for passage in passages:
            found = list(words(passage))
            key = _key(found)
            before, after = (
                (passage[: found[0].start], passage[found[-1].end :]) if found else ("", "")
            )
            with self._lock:
                keys.append(key)
                if key not in self._known:
                    self.chars += len(key)
                    bisect.insort(self._alike.setdefault(key[:WINDOW], []), key)
                self._known[key] = _Passage(before, after, _digest(passage))
        return keys

    def forget(self, keys: Iterable[str]) -> None:
        """Forget the passages of these keys."""
        with self._lock:
            for key in keys:
                if self._known.pop(key, None) is not None:
                    self.chars -= len(key)
                    alike = self._alike[key[:WINDOW]]
                    del alike[bisect.bisect_left(alike, key)]
                    if not alike:
                        del self._alike[key[:WINDOW]]

    def find(self, prompt: str) -> list[TextMatch]:
        """The known passages in `prompt`, in order and without overlaps.

        The leftmost ones, and of several at one place the longest; never a part of a word.
        """
        if not self._known:
            return []
        found = self._find(prompt, list(words(prompt)))
        if _ESCAPE.search(prompt):
            found = joined(found, self._find(prompt, _unescaped_words(prompt)))
        return found

    def _find(self, prompt: str, there: Sequence[Word]) -> list[TextMatch]:
        key = _key(there)
        starts = list(accumulate((len(word.text) + 1 for word in there), initial=0))
        found = list[TextMatch]()
        after = 0
        for number, start in enumerate(starts):
            if start < after:
                continue
            with self._lock:  # for each word: other prompts need not wait for the whole of this one
                match = self._longest_at(start, key)
                passage = None if match is None else self._known[match]
            if match is None or passage is None:
                continue
            after = start + len(match)
            last = there[bisect.bisect_left(starts, after) - 1]
            free_from = found[-1].stop if found else 0
            begin, end = passage.place(prompt, there[number], last, free_from)
            text = prompt[begin:end]
            found.append(TextMatch(begin, end, text, match, _digest(text) == passage.digest))
            if len(found) == MAX_FOUND:
                break
        return found

    def _longest_at(self, start: int, prompt: str) -> str | None:
        """The longest of the known keys with which a prompt's key goes on at `start`, or `None`."""
        alike = self._alike.get(prompt[start : start + WINDOW], ())
        stop = len(prompt)
        if len(prompt) - start < WINDOW:
            return None

        def is_behind(key: str) -> bool:
            """Whether `key` is sorted behind the prompt from `start` to `stop`."""
            return key > prompt[start : min(stop, start + len(key))]

        # All keys that begin the prompt here are in front of it, and each of them begins the last
        # one in front.
        while at := bisect.bisect_left(alike, True, key=is_behind):
            last = alike[at - 1]
            if start + len(last) <= stop and prompt.startswith(last, start):
                return last
            stop = start + _alike_chars(last, prompt[start : min(stop, start + len(last))])
        return None


def joined(first: Sequence[TextMatch], others: Iterable[TextMatch]) -> list[TextMatch]:
    """All of `first`, which is in order, and those of `others` that overlap none of them,
    in order.
    """
    starts = [one.start for one in first]

    def is_free(one: TextMatch) -> bool:
        at = bisect.bisect_right(starts, one.start)
        return (at == 0 or first[at - 1].stop <= one.start) and (
            at == len(first) or one.stop <= starts[at]
        )

    return sorted([*first, *filter(is_free, others)], key=lambda one: one.start)


def _key(found: Iterable[Word]) -> str:
    return "".join(f"{word.text}\n" for word in found)


def _unescaped_words(prompt: str) -> list[Word]:
    """The words of a prompt whose escapes of JSON and HTML are what they stand for; offsets are the
    prompt's.
    """
    parts = list[str]()
    origin = list[int]()
    at = 0
    for escape in _ESCAPE.finditer(prompt):
        meant = _meaning(escape[0])
        parts += (prompt[at : escape.start()], meant)
        origin += [*range(at, escape.start()), *[escape.start()] * len(meant)]
        at = escape.end()
    origin += range(at, len(prompt) + 1)
    found = words("".join((*parts, prompt[at:])))
    return [word._replace(start=origin[word.start], end=origin[word.end]) for word in found]


def _meaning(escape: str) -> str:
    """The character that an escape of JSON or HTML stands for; a line break for controls and
    `<br>`.
    """
    if escape.startswith("\\u"):
        return str(json.loads(f'"{escape}"'))
    return html.unescape(escape) if escape.startswith("&") else "\n"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _alike_chars(one: Iterable[str], other: Iterable[str]) -> int:
    """How many characters at the beginning of both are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
