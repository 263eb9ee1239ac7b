"""Turns the letters of a page, as PDFium gives them, into text. Raised and lowered letters have
marks, letters that were drawn twice occur once, and words that are broken at the end of a line are
joined.
"""

import ctypes
import math
import re
from dataclasses import dataclass
from typing import Any

from ..marks import Part, Place, joined

# A letter is raised or lowered if it is so much smaller than those before it, and so far off their
# line, in their height.
SMALL = 0.85
RAISED = 0.12
LOWERED = -0.04
OFF_LINE = 0.8
# A gap of so much of a letter's height is a space.
SPACE = 0.15
# A word that is broken at the end of a line: PDFium gives U+0002 for the hyphen.
# A pattern that begins at the start of a word alone: each word is looked at once.
_BROKEN = re.compile(r"(?<!\w)(\w*+)\x02\s*+(?=(\w*+))")


@dataclass(slots=True)
class _Letter:
    """Where a letter stands: the start of its line and its box, in points."""

    x: float
    y: float
    right: float
    height: float


class _Letters:
    """Puts the letters of a page together."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._base: _Letter | None = None  # the last letter of full height
        self._last: _Letter | None = None
        self._breaks = False  # the line seems to end here
        self._is_spaced = False  # white space stands here
        self._drawn = set[tuple[str, float, float]]()
        self._place = (math.nan, math.nan)  # of the last glyph
        self._is_again = False  # whether it was drawn there before

    def space(self, text: str) -> None:
        """White space, of the text or added by PDFium."""
        if "\n" in text or "\r" in text:
            self._breaks = True
        else:
            self._is_spaced = True

    def letter(self, text: str, at: _Letter) -> None:
        """The next letter. A glyph that was drawn at this place before is left out: some programs
        print a page twice. A glyph may have several letters, as a ligature has: they follow each
        other at one place.
        """
        place = (round(at.x, 1), round(at.y, 1))
        if place != self._place:
            self._place = place
            self._is_again = (text, *place) in self._drawn
        if self._is_again:
            return
        self._drawn.add((text, *place))
        stands = self._stands(at)
        if self._breaks:
            self._break(at, stands)
        elif self._is_spaced or (stands is Place.LINE and self._is_after_a_number(at)):
            self._parts.append((" ", Place.LINE))
        self._is_spaced = False
        self._parts.append((text, stands))
        if stands is Place.LINE:
            self._base = at
        self._last = at

    def text(self) -> str:
        """All letters so far."""
        return joined(self._parts)

    def _stands(self, at: _Letter) -> Place:
        base = self._base
        if base is None or at.height >= SMALL * base.height or at.x < base.x:
            return Place.LINE
        off = (at.y - base.y) / base.height
        if RAISED < off < OFF_LINE:
            return Place.RAISED
        return Place.LOWERED if -OFF_LINE < off < LOWERED else Place.LINE

    def _break(self, at: _Letter, stands: Place) -> None:
        """End the line, unless the letter goes on in the line of the last full letter."""
        self._breaks = False
        base, last = self._base, self._last
        is_off = base is None or abs(at.y - base.y) >= RAISED * base.height
        if last is None or at.x < last.x or (stands is Place.LINE and is_off):
            self._parts.append(("\n", Place.LINE))
        elif self._is_spaced or at.x - last.right > SPACE * at.height:
            self._parts.append((" ", Place.LINE))

    def _is_after_a_number(self, at: _Letter) -> bool:
        """Whether a line goes on in full height after a raised number at its start, as notes do."""
        base = self._base
        if base is None or base is not self._last or not self._parts[-1][0].isalnum():
            return False
        off = (base.y - at.y) / at.height
        return base.height < SMALL * at.height and RAISED < off < OFF_LINE and at.x >= base.x


def page_text(pdfium: Any, page: Any) -> str:
    """The text of a page of PDFium, with U+0002 where a word is broken."""
    raw = pdfium.raw
    text_page = page.get_textpage()
    made = _Letters()
    x = ctypes.c_double()
    y = ctypes.c_double()
    box = raw.FS_RECTF()
    high = ""  # the first half of a character
    for number in range(raw.FPDFText_CountChars(text_page)):
        text = chr(raw.FPDFText_GetUnicode(text_page, number))
        if "\ud800" <= text < "\udc00":
            high = text
            continue
        text = high + text
        high = ""
        if text.isspace():
            made.space(text)
            continue
        raw.FPDFText_GetCharOrigin(text_page, number, x, y)
        raw.FPDFText_GetLooseCharBox(text_page, number, box)
        made.letter(text, _Letter(x.value, y.value, box.right, box.top - box.bottom or 1.0))
    text_page.close()
    return made.text() + high


def unbroken(pages: list[str]) -> list[str]:
    """The pages with broken words joined. The hyphen stays if the word has one elsewhere, or if
    what follows is no small letter.
    """
    hyphenated = {word.lower() for page in pages for word in re.findall(r"\b\w++-\w++", page)}

    def joined_word(found: re.Match[str]) -> str:
        first, second = found.groups()
        keeps = not second[:1].islower() or f"{first}-{second}".lower() in hyphenated
        return f"{first}-" if keeps or not first[-1:].isalpha() else first

    return [_BROKEN.sub(joined_word, page) for page in pages]
