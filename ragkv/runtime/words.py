"""The words of a text, in the form in which they are compared by BM25, citations and the search for
passages.

Two writings of a word have one form: composed or not, in full width, with ligatures, in capitals,
"ss" for the sharp s (NFKC and case folding). Marks belong to their letters: without them words of
Hindi and Bengali mean something else. Only the points that Arabic and Hebrew are mostly written
without are left out. Scripts that are written without spaces are cut at every character that a
reader sees, because no rule finds their words. Unlike UAX 29, the rule of a double click, this ends
a word at an apostrophe and at a dot. So a query for "example" also finds "example.com".
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

import regex

_UNSPACED = (
    r"[[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    r"\u30fc\uff70\uff9e\uff9f]&&[\p{L}\p{M}\p{N}]]"
)
# Underscores join the parts of a name; around a word they are emphasis.
_LETTERS = rf"(?:(?!{_UNSPACED})[\p{{L}}\p{{M}}\p{{N}}][\u00ad\u200c\u200d]*+)++"
_RUNS = regex.compile(
    rf"(?V1)(?P<cut>{_UNSPACED}\p{{M}}*+)(?:{_UNSPACED}|\p{{M}})*+|{_LETTERS}(?:\p{{Pc}}++{_LETTERS})*+"
)
_ASCII_RUNS = re.compile(r"[^\W_]++(?:_++[^\W_]++)*+")
# A nasal mark and a tone mark of Thai or Lao before a long a, in the order in which
# some type them.
_SARA_AM = regex.compile("([\u0e4d\u0ecd])([\u0e48-\u0e4b\u0ec8-\u0ecb])(?=[\u0e32\u0eb2])")
# One that a reader sees; a long a behind a nasal mark is a part of it, however both
# are written.
_CHARACTER = regex.compile(r"\X(?:(?<=[\u0e4d\u0ecd][\u0e48-\u0e4b\u0ec8-\u0ecb]?)[\u0e32\u0eb2])?")
# The points of Hebrew and Arabic, the stretched line of Arabic, invisible joints,
# and the dot that lower case gives to a Turkish capital I.
_LEFT_OUT = regex.compile(
    "[\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06ed\u00ad\u200c\u200d]|(?<=i)\u0307"
)


class Word(NamedTuple):
    """A word, and where it stands."""

    text: str  # its form for comparisons
    start: int  # offsets in the original text
    end: int
    is_cut: bool  # a character of a script without spaces


def words(text: str) -> Iterator[Word]:
    """The words of `text` in order."""
    if text.isascii():  # most text, and several times as fast
        yield from (
            Word(run[0].lower(), run.start(), run.end(), False)
            for run in _ASCII_RUNS.finditer(text)
        )
        return
    for run in _RUNS.finditer(text):
        if run["cut"] is None:
            if form := normal(run[0]):
                yield Word(form, run.start(), run.end(), False)
            continue
        for character in _CHARACTER.finditer(run[0]):
            if form := normal(character[0]):
                yield Word(
                    form, run.start() + character.start(), run.start() + character.end(), True
                )


def normal(word: str) -> str:
    """The form of a word in which it is compared."""
    if word.isascii():
        return word.lower()
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", word).casefold())
    return str(_SARA_AM.sub(r"\2\1", _LEFT_OUT.sub("", folded)))
