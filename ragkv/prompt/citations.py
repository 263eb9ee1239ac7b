"""Citations: the places where chunks contain the answer word for word."""

import re
from collections.abc import Sequence

from ragkv.types import Chunk, Citation

_MARKER = re.compile(r"\[(\d+)\]")


def cite(answer: str, chunks: Sequence[Chunk]) -> tuple[Citation, ...]:
    """One citation for each chunk that contains the answer (any case, whole words) or that it names as `[n]`."""
    named = {int(number) - 1 for number in _MARKER.findall(answer)}
    plain = _MARKER.sub("", answer).strip().strip(".")
    pattern = re.compile(rf"(?<!\w){re.escape(plain)}(?!\w)", re.IGNORECASE) if plain else None
    found = []
    for index, chunk in enumerate(chunks):
        match = pattern.search(chunk.text) if pattern else None
        source = str(chunk.metadata.get("source", ""))
        if match:
            found.append(Citation(index, match.start(), match.end(), source))
        elif index in named:
            found.append(Citation(index, 0, len(chunk.text), source))
    return tuple(found)


__all__ = ["cite"]
