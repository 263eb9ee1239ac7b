"""Which chunks an answer cites: those that contain it, and those that it names as `[n]`.

An answer of common words alone ("No.", "It is") is in many chunks by chance, so it cites none of
them. Chunks may be in any language, so no list of words decides. A word counts as telling if it is
long, holds a digit, or is a name in the chunk.
"""

import re
from collections.abc import Sequence

from ragkv.runtime.words import Word, words
from ragkv.types import Citation, Piece

from .prompt import chunks_among

# How an answer names a chunk, by its number from 1. Python refuses numbers of very many digits.
MARKER = re.compile(r"\[(\d{1,4})\]")
LEAST_LETTERS = 4  # Shorter words of a script with capitals are mostly "the", "no" and "yes".
LEAST_SIGNS = 2  # Other scripts write a word with fewer signs, and a particle with one.
_ENDS = ".!?:\n"  # A capital letter after one of these is no sign of a name.


def cite(answer: str, pieces: Sequence[Piece]) -> tuple[Citation, ...]:
    """One citation for each chunk that contains the answer or that it names as `[n]`. A `Text` is
    none, and has no number.

    Whole words count, in any of their writings and whatever stands between them: a line break,
    `**bold**`.
    """
    chunks = chunks_among(pieces)
    named = {int(number) - 1 for number in MARKER.findall(answer)} & set(range(len(chunks)))
    plain = (
        MARKER.sub(lambda marker: "" if int(marker[1]) - 1 in named else marker[0], answer)
        .strip()
        .strip(".")
    )
    found = []
    for index, chunk in enumerate(chunks):
        span = _place_of(plain, chunk.text)
        source = str(chunk.metadata.get("source", ""))
        if span is not None:
            found.append(Citation(index, *span, source))
        elif index in named:
            found.append(Citation(index, 0, len(chunk.text), source))
    return tuple(found)


def _place_of(phrase: str, text: str) -> tuple[int, int] | None:
    """The first place of the words of `phrase` in `text`, with the marks around them that both
    have. `None` if there is none, or if they are common words alone.
    """
    wanted = list(words(phrase))
    there = list(words(text))
    if not wanted:
        return None
    joined = "".join(f"\n{word.text}" for word in there) + "\n"
    at = joined.find("".join(f"\n{word.text}" for word in wanted) + "\n")
    if at < 0:
        return None
    first = joined.count("\n", 0, at)
    place = there[first : first + len(wanted)]
    if not _is_telling(place, there, text):
        return None
    start = place[0].start
    end = place[-1].end
    before = phrase[: wanted[0].start]
    after = phrase[wanted[-1].end :]
    while before and text[max(0, start - 1) : start] == before[-1]:
        start = start - 1
        before = before[:-1]
    while after and text[end : end + 1] == after[0]:
        end = end + 1
        after = after[1:]
    return start, end


def _is_telling(place: Sequence[Word], there: Sequence[Word], text: str) -> bool:
    """Whether one word of `place` is more than a common one; `there` are all words of `text`."""
    signs = 0  # how many signs of scripts without capitals it has
    for word in place:
        written = text[word.start : word.end]
        if any(char.isdigit() for char in written):
            return True
        if written.lower() == written.upper():
            signs += len(written)
        elif len(word.text) >= LEAST_LETTERS or _is_name(word, there, text):
            return True
    return signs >= LEAST_SIGNS


def _is_name(name: Word, there: Sequence[Word], text: str) -> bool:
    """Whether a short word has a capital wherever it stands in `text`, once inside a sentence."""
    places = [word.start for word in there if word.text == name.text]
    if len(name.text) < 2 or not all(text[start].isupper() for start in places):
        return False
    before = (text[:start].rstrip(" \t*_\"'([") for start in places)
    return any(one and one[-1] not in _ENDS for one in before)
