"""Which chunks an answer cites: those that contain it, and those that it names as `[n]`."""

import re
from collections.abc import Sequence

from ragkv.runtime.words import words
from ragkv.types import Chunk, Citation

_MARKER = re.compile(r"\[(\d+)\]")  # how an answer names a chunk, by its number from 1


def cite(answer: str, chunks: Sequence[Chunk]) -> tuple[Citation, ...]:
    """One citation for each chunk that contains the answer or that it names as `[n]`.

    Whole words count, in any of their writings and whatever stands between them: a line break,
    `**bold**`.
    """
    named = {int(number) - 1 for number in _MARKER.findall(answer)} & set(range(len(chunks)))
    plain = (
        _MARKER.sub(lambda marker: "" if int(marker[1]) - 1 in named else marker[0], answer)
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
    """Where the words of `phrase` first stand in `text`, with the marks around them that
    both have.
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
    start = there[first].start
    end = there[first + len(wanted) - 1].end
    before = phrase[: wanted[0].start]
    after = phrase[wanted[-1].end :]
    while before and text[max(0, start - 1) : start] == before[-1]:
        start = start - 1
        before = before[:-1]
    while after and text[end : end + 1] == after[0]:
        end = end + 1
        after = after[1:]
    return start, end
