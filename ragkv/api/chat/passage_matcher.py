"""Finds known passages in a prompt although a template changed their writing: tolerant where it does no harm.

Passages and prompt are compared by their letters and digits alone, so indentation, line breaks, quoting, punctuation
and everything around a passage do not matter. JSON and HTML escapes are read as what they stand for. What is found is a
*range of the prompt*: the prompt's own text, as it stands there, becomes the chunk. So a wrong match could only cut the
prompt at another place, and no text of a passage ever replaces text of a prompt.
"""

import bisect
import functools
import hashlib
import html
import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .text_matcher import TextMatcher, alike_chars

MAX_CHARS = 2_000_000  # So much of a prompt is searched.
MAX_FOUND = 256  # At most so many passages are found in one prompt.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|"  # a pair of surrogates is one character
    r"\\(?:u[0-9a-fA-F]{4}|[\"\\/bfnrt])|&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z]{2,8});|<br ?/?>"
)
_NO_LETTER = "\n"  # Escapes of control characters, quotes and line breaks stand for this: none is a letter.

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A known text in a prompt."""

    start: int  # character offsets
    stop: int
    text: str  # as it stands there
    key: str  # its letters and digits
    word_for_word: bool  # whether the prompt has exactly the known text


class _Passage(NamedTuple):
    """A known passage."""

    before: str  # what stands before its first letter
    after: str  # what stands after its last letter
    digest: bytes  # of its text


@dataclass(frozen=True, slots=True)
class _Letters:
    """The letters and digits of a text."""

    text: str
    starts: Positions  # where each of them begins in the whole text
    stops: Positions  # and ends; an escape has several characters


def key_of(passage: str) -> str:
    """The letters and digits of a passage: equal for all its writings."""
    return _letters(passage, unescape=False).text


class PassageMatcher:
    """Known passages and their places in a prompt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._matcher = TextMatcher()
        self._known: dict[str, _Passage] = {}  # by key
        self.chars = 0  # letters and digits of all known passages

    def add(self, passages: Iterable[str]) -> None:
        """Know `passages`. Very short ones are not found."""
        added: dict[str, _Passage] = {}
        for passage in passages:
            letters = _letters(passage, unescape=False)
            if letters.text:
                before, after = passage[: int(letters.starts[0])], passage[int(letters.stops[-1]) :]
                added[letters.text] = _Passage(before, after, _digest(passage))
        with self._lock:
            self.chars += sum(len(key) for key in added if key not in self._known)
            self._known.update(added)
        self._matcher.add(added)

    def discard(self, keys: Iterable[str]) -> None:
        """Forget the passages of these keys."""
        dropped = list(keys)
        with self._lock:
            self.chars -= sum(len(key) for key in dropped if self._known.pop(key, None) is not None)
        self._matcher.discard(dropped)

    def find(self, prompt: str) -> list[TextMatch]:
        """The known passages in `prompt`, in order and without overlaps. Text beyond `MAX_CHARS` is not searched."""
        if not self._known:
            return []
        prompt = prompt[:MAX_CHARS]
        found = self._find(prompt, _letters(prompt, unescape=False))
        if _ESCAPE.search(prompt):
            found = joined(found, self._find(prompt, _letters(prompt, unescape=True)))
        return found

    def _find(self, prompt: str, letters: _Letters) -> list[TextMatch]:
        def is_border(start: int, stop: int) -> bool:
            """Whether no word of the prompt crosses either end of these letters."""
            before = start > 0 and letters.stops[start - 1] == letters.starts[start]
            after = stop < len(letters.text) and letters.stops[stop - 1] == letters.starts[stop]
            return not (before or after)

        found = list[TextMatch]()
        for at, key in self._matcher.find(letters.text, is_border):
            start, stop = int(letters.starts[at]), int(letters.stops[at + len(key) - 1])
            if (known := self._known.get(key)) is None:
                continue  # forgotten meanwhile
            free = prompt[max(found[-1].stop if found else 0, start - len(known.before)) : start]
            start -= alike_chars(reversed(free), reversed(known.before))
            stop += alike_chars(prompt[stop : stop + len(known.after)], known.after)
            text = prompt[start:stop]
            found.append(TextMatch(start, stop, text, key, _digest(text) == known.digest))
            if len(found) == MAX_FOUND:
                break
        return found


def joined(first: Sequence[TextMatch], others: Iterable[TextMatch]) -> list[TextMatch]:
    """All of `first`, which is in order, and those of `others` that overlap none of them, in order."""
    starts = [one.start for one in first]

    def is_free(one: TextMatch) -> bool:
        at = bisect.bisect_right(starts, one.start)
        return (at == 0 or first[at - 1].stop <= one.start) and (at == len(first) or one.stop <= starts[at])

    return sorted([*first, *filter(is_free, others)], key=lambda one: one.start)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _letters(text: str, *, unescape: bool) -> _Letters:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).copy()
    stops: Positions = np.arange(1, len(codes) + 1)
    mask = _is_letter()[codes]
    for escape in _ESCAPE.finditer(text) if unescape else ():
        mask[escape.start() : escape.end()] = False
        meant = _meaning(escape[0])
        if len(meant) == 1 and meant.isalnum():
            codes[escape.start()], mask[escape.start()] = ord(meant), True
            stops[escape.start()] = escape.end()
    starts: Positions = np.flatnonzero(mask)
    return _Letters(codes[starts].tobytes().decode("utf-32-le"), starts, stops[starts])


def _meaning(escape: str) -> str:
    """The character that an escape of JSON or HTML stands for."""
    if escape.startswith("\\u"):
        return str(json.loads(f'"{escape}"'))
    return html.unescape(escape) if escape.startswith("&") else _NO_LETTER


@functools.cache
def _is_letter() -> npt.NDArray[np.bool_]:
    """For each code point whether it is a letter or a digit."""
    return np.fromiter((chr(code).isalnum() for code in range(0x110000)), np.bool_, 0x110000)
