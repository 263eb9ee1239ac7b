"""Citation markers in an answer's text: `[n]` means the n-th source, and no other number is ever shown.

A marker that the model writes passes if its source exists. Sources that say what the answer says, and that the answer
does not name, are named at its end. Markers belong to the server, not to the conversation: they are removed from an
earlier answer that a client sends back.
"""

import re
from collections.abc import Sequence

from .bodies.resources import Citation

_MARKER = re.compile(r"\[(\d{1,4})\]")
_PARTIAL = re.compile(r"\[\d{0,4}$")  # the beginning of a possible marker
_FINAL = re.compile(r" (?:\[\d{1,4}\])+$")


class MarkerFilter:
    """Passes streamed text through, without the markers of sources that do not exist."""

    def __init__(self, sources: int) -> None:
        """`sources` is their number; with 0, all brackets pass."""
        self._sources, self._held = sources, ""
        self.text = ""  # everything that passed

    def add(self, piece: str) -> str:
        """Add a piece of text; returns the text that is certain now."""
        if not self._sources:
            return self._pass(piece)
        self._held += piece
        partial = _PARTIAL.search(self._held)
        cut = len(self._held) if partial is None else partial.start()
        certain, self._held = self._held[:cut], self._held[cut:]
        return self._pass(_MARKER.sub(self._checked, certain))

    def finish(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return self._pass(held)

    def _checked(self, marker: re.Match[str]) -> str:
        return marker[0] if 1 <= int(marker[1]) <= self._sources else ""

    def _pass(self, text: str) -> str:
        self.text += text
        return text


def missing_markers(text: str, citations: Sequence[Citation]) -> str:
    """The markers to append to `text`: those of cited sources that it does not name."""
    named = {int(number) for number in _MARKER.findall(text)}
    missing = [citation.number for citation in citations if citation.number not in named]
    return " " + "".join(f"[{number}]" for number in missing) if missing else ""


def marker_spans(text: str, citations: Sequence[Citation]) -> list[tuple[Citation, int, int]]:
    """Each citation with start and end of its first marker in `text`; citations without a marker are left out."""
    found = []
    for citation in citations:
        marker = f"[{citation.number}]"
        if (start := text.find(marker)) >= 0:
            found.append((citation, start, start + len(marker)))
    return found


def without_markers(text: str) -> str:
    """An earlier answer without the markers that the server appended."""
    return _FINAL.sub("", text)
