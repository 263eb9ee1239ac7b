"""Citation markers in an answer's text: `[n]` means the n-th source, and no other number is ever shown.

What the model writes of markers passes if its source is there. Sources that say what the answer says, and are not named
yet, are named behind it. So markers are the server's, not the conversation's: they are taken off again where a client
sends an earlier answer back.
"""

import re
from collections.abc import Sequence

from .schemas import Citation

_MARKER = re.compile(r"\[(\d{1,4})\]")
_MAYBE = re.compile(r"\[\d{0,4}$")  # what may still become one
_BEHIND = re.compile(r" (?:\[\d{1,4}\])+$")


class Markers:
    """Lets text through as it comes, but for markers of sources that are not there."""

    def __init__(self, sources: int) -> None:
        """Without sources every bracket is the answer's own."""
        self._sources, self._held = sources, ""
        self.text = ""  # what was let through

    def add(self, piece: str) -> str:
        """What of the text so far is certain now."""
        if not self._sources:
            return self._through(piece)
        self._held += piece
        maybe = _MAYBE.search(self._held)
        cut = len(self._held) if maybe is None else maybe.start()
        sure, self._held = self._held[:cut], self._held[cut:]
        return self._through(_MARKER.sub(self._checked, sure))

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return self._through(held)

    def _checked(self, marker: re.Match[str]) -> str:
        return marker[0] if 1 <= int(marker[1]) <= self._sources else ""

    def _through(self, text: str) -> str:
        self.text += text
        return text


def behind(text: str, citations: Sequence[Citation]) -> str:
    """The markers that go behind `text`: of cited sources that it does not name."""
    named = {int(number) for number in _MARKER.findall(text)}
    missing = [citation.number for citation in citations if citation.number not in named]
    return " " + "".join(f"[{number}]" for number in missing) if missing else ""


def places(text: str, citations: Sequence[Citation]) -> list[tuple[Citation, int, int]]:
    """Each citation with its marker's first place in `text`; those without one are left out."""
    found = []
    for citation in citations:
        marker = f"[{citation.number}]"
        if (start := text.find(marker)) >= 0:
            found.append((citation, start, start + len(marker)))
    return found


def without_markers(text: str) -> str:
    """An earlier answer, as it was before it was marked."""
    return _BEHIND.sub("", text)


__all__ = ["Markers", "behind", "places", "without_markers"]
