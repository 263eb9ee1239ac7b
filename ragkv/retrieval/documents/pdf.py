"""PDF: the text by pages, then the values of form fields. A page that cannot be read costs this
page.

PDFium reads the text. It knows what was drawn twice, what a ligature means (ActualText), and where
a word is broken at the end of a line. pypdf reads forms, notes, and which layers are off.
"""

import ctypes
import io
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ragkv.runtime import counted

from .marks import lowered, raised
from .reading import FileContent, Loaded, part

# PDFium is not made for threads.
_PDFIUM = threading.Lock()
# A letter is raised or lowered if it is so much smaller than those before it, and so far off their
# line, in their height.
SMALL = 0.85
RAISED = 0.12
LOWERED = -0.04
OFF_LINE = 0.8
# A gap of so much of a letter's height is a space.
SPACE = 0.15
# What PDFium gives for a hyphen at the end of a line, which it leaves out.
HYPHEN = "\x02"
# Annotations that are text of the page, and those by which readers comment on it.
TYPED = "/FreeText"
NOTES = ("/Text", "/Highlight", "/Underline", "/StrikeOut", "/Squiggly", "/Caret")


def load_pdf(content: FileContent) -> Loaded:
    """One document; sources name the page."""
    pypdf = content.need("pypdf", "pypdf", "pdf")
    pdfium = content.need("pypdfium2", "pypdfium2", "pdf")
    lost = list[str]()
    with content.parsing("PDF"):
        reader = pypdf.PdfReader(io.BytesIO(content.data))
        off = set[str]()
        with part(lost, "layers"):
            off = _layers_off(reader)
        with _PDFIUM:
            texts = list(content.bounded(_page_texts(content, pdfium, reader, off, lost)))
        pages = _unbroken(texts)
        with part(lost, "the form"):
            if fields := "\n".join(content.bounded(_field_values(reader))):
                pages[-1] = f"{pages[-1].strip()}\n\n{fields}"
    yield content.document(pages, {}, lost)


def _page_texts(
    content: FileContent, pdfium: Any, reader: Any, off: set[str], lost: list[str]
) -> Iterator[str]:
    """The text of each page. The limits are checked before a page's text is extracted, which is the
    slow part.
    """
    inflated = 0
    notes = 0
    left_out = 0
    with pdfium.PdfDocument(content.data) as document:
        for number, (page, beside) in enumerate(zip(document, reader.pages, strict=False), start=1):
            text = ""
            with part(lost, f"page {number}"):
                if (stream := beside.get_contents()) is not None:
                    inflated += len(stream.get_data())
                    content.limits.check(
                        "inflated_bytes",
                        inflated,
                        f"{content.path}: the decompressed size of its pages in bytes",
                    )
                left_out += _take_out(pdfium, page, off) if off else 0
                text = _page_text(pdfium, page)
                typed, count = _annotations(beside)
                text = "\n\n".join(filter(None, (text.strip(), *typed)))
                notes += count
            page.close()
            yield text
    if notes:
        lost.append(counted(notes, "comment"))
    if left_out:
        lost.append(f"layers that are off: {', '.join(sorted(off))}")


@dataclass(slots=True)
class _Letter:
    """Where a letter stands: the start of its line and its box, in points."""

    x: float
    y: float
    right: float
    height: float


class _PageText:
    """Puts the letters of a page together, with marks before raised and lowered ones."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._script: list[str] = []  # raised or lowered letters
        self._shift = 0  # 1: they are raised; -1: lowered
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
        shift = self._shift_of(at)
        if self._breaks:
            self._break(at, shift)
        elif self._is_spaced or (not shift and self._is_after_a_number(at)):
            self._end_script()
            self._parts.append(" ")
        self._is_spaced = False
        if shift != self._shift:
            self._end_script()
            self._shift = shift
        if shift:
            self._script.append(text)
        else:
            self._parts.append(text)
            self._base = at
        self._last = at

    def text(self) -> str:
        self._end_script()
        return "".join(self._parts)

    def _shift_of(self, at: _Letter) -> int:
        base = self._base
        if base is None or at.height >= SMALL * base.height or at.x < base.x:
            return 0
        off = (at.y - base.y) / base.height
        return 1 if RAISED < off < OFF_LINE else -1 if -OFF_LINE < off < LOWERED else 0

    def _break(self, at: _Letter, shift: int) -> None:
        """End the line, unless the letter goes on in the line of the last full letter."""
        self._breaks = False
        base, last = self._base, self._last
        if (
            base is None
            or last is None
            or at.x < last.x
            or not (shift or abs(at.y - base.y) < RAISED * base.height)
        ):
            self._end_script()
            self._shift = 0
            self._parts.append("\n")
        elif self._is_spaced or at.x - last.right > SPACE * at.height:
            self._end_script()
            self._shift = 0
            self._parts.append(" ")

    def _is_after_a_number(self, at: _Letter) -> bool:
        """Whether a line goes on in full height after a raised number at its start, as notes do."""
        base = self._base
        if base is None or base is not self._last or not self._parts[-1].isalnum():
            return False
        off = (base.y - at.y) / at.height
        return base.height < SMALL * at.height and RAISED < off < OFF_LINE and at.x >= base.x

    def _end_script(self) -> None:
        if self._script:
            text = "".join(self._script)
            before = self._parts[-1] if self._parts else ""
            self._parts.append(raised(text) if self._shift > 0 else lowered(text, before))
            self._script = []
        self._shift = 0


def _page_text(pdfium: Any, page: Any) -> str:
    """The text of a page of PDFium, with `HYPHEN` where a word is broken."""
    raw = pdfium.raw
    text_page = page.get_textpage()
    made = _PageText()
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


def _unbroken(pages: list[str]) -> list[str]:
    """The pages with broken words joined. The hyphen stays if the word has one elsewhere, or if what
    follows is no small letter.
    """
    hyphenated = {word.lower() for page in pages for word in re.findall(r"\b\w++-\w++", page)}

    def joined(found: re.Match[str]) -> str:
        first, second = found.groups()
        keeps = not second[:1].islower() or f"{first}-{second}".lower() in hyphenated
        return f"{first}-{second}" if keeps or not first[-1:].isalpha() else first + second

    return [re.sub(rf"(\w*){HYPHEN}\s*(\w*)", joined, page) for page in pages]


def _layers_off(reader: Any) -> set[str]:
    """The names of layers that are not shown when the file is opened."""
    layers = reader.trailer["/Root"].get("/OCProperties", {})
    shown = layers.get("/D", {})
    groups = {one.idnum: one.get_object() for one in layers.get("/OCGs", ())}
    off = {one.idnum for one in shown.get("/OFF", ())}
    if shown.get("/BaseState") == "/OFF":
        off = groups.keys() - {one.idnum for one in shown.get("/ON", ())}
    hidden = {str(group.get("/Name", "")) for number, group in groups.items() if number in off}
    visible = {str(group.get("/Name", "")) for number, group in groups.items() if number not in off}
    return hidden - visible - {""}


def _take_out(pdfium: Any, page: Any, off: set[str]) -> int:
    """Remove what belongs to a layer that is off, and return how many objects that were."""
    raw = pdfium.raw
    found = [one for one in page.get_objects(max_depth=1) if _layers_of(raw, one) & off]
    for one in found:
        page.remove_obj(one)
    return len(found)


def _layers_of(raw: Any, thing: Any) -> set[str]:
    names = set[str]()
    for number in range(raw.FPDFPageObj_CountMarks(thing)):
        mark = raw.FPDFPageObj_GetMark(thing, number)
        size = ctypes.c_ulong()
        raw.FPDFPageObjMark_GetParamStringValue(mark, b"Name", None, 0, size)
        if size.value:
            buffer = (ctypes.c_ushort * (size.value // 2 + 1))()
            raw.FPDFPageObjMark_GetParamStringValue(mark, b"Name", buffer, size.value, size)
            names.add(bytes(buffer)[: size.value].decode("utf-16-le", "replace").rstrip("\0"))
    return names


def _annotations(page: Any) -> tuple[list[str], int]:
    """The texts that were typed onto a page, and how many comments of readers it has."""
    typed = list[str]()
    notes = 0
    for reference in page.get("/Annots") or ():
        annotation = reference.get_object()
        text = str(annotation.get("/Contents") or "").replace("\r", "\n").strip()
        if text and annotation.get("/Subtype") == TYPED:
            typed.append(text)
        notes += bool(text and annotation.get("/Subtype") in NOTES)
    return typed, notes


def _field_values(reader: Any) -> Iterator[str]:
    """What a form was filled in with, as "name: value"."""
    for name, field in (reader.get_fields() or {}).items():
        value = str(field.value if field.value is not None else "").removeprefix("/").strip()
        if value and value != "Off":
            yield f"{name}: {value}"
