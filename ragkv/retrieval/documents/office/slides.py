"""PowerPoint: the texts, tables and notes of each slide; slides count as pages.

The title comes first, wherever it was drawn; the other shapes follow in the order in which they
were drawn, which is the one that screen readers use. A hidden slide is left out, and this is told.
"""

import io
from collections.abc import Iterator
from typing import Any

from ragkv.runtime import counted

from ..formulas import formula_text
from ..html_tables import Cell, table_of
from ..marks import Kind, Part, Place, joined, number_text, struck
from ..reading import FileContent, Loaded, Once, part
from .archives import CORE, EXTRA, opened_archive, title_in, unpacked_bytes

A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_KINDS: dict[str, Kind] = {
    "alphaLc": "letter",
    "alphaUc": "LETTER",
    "romanLc": "roman",
    "romanUc": "ROMAN",
}
# What stands around the numbers of items.
_AROUND = {"ParenBoth": "({})", "ParenR": "{})", "Period": "{}.", "Plain": "{}"}


def load_pptx(content: FileContent) -> Loaded:
    """One document."""
    pptx = content.need("pptx", "python-pptx", EXTRA)
    lost = list[str]()
    with content.parsing("PPTX"):
        archive = opened_archive(content)
        slides = pptx.Presentation(io.BytesIO(content.data)).slides
        texts = list(content.bounded(_slide_texts(slides, lost), unpacked_bytes(archive)))
        title = title_in(archive, CORE)
    yield content.document(texts, {"title": title}, lost)


def _slide_texts(slides: Any, lost: list[str]) -> Iterator[str]:
    once = Once(lost)
    for number, slide in enumerate(slides, start=1):
        text = ""
        if slide._element.get("show") in ("0", "false"):
            lost.append(f"slide {number}, which is hidden")
        elif not once.was_read(slide.part.partname, f"slide {number}"):
            with part(lost, f"slide {number}"):
                text = _slide_text(slide, f"slide {number}", lost)
        yield text


def _slide_text(slide: Any, name: str, lost: list[str]) -> str:
    title = slide.shapes.title
    others = (shape for shape in slide.shapes if title is None or shape != title)
    shapes = list(others) if title is None else [title, *others]
    found = [text for shape in shapes if not _is_hidden(shape) for text in _shape_texts(shape)]
    hidden = (text for shape in shapes if _is_hidden(shape) for text in _shape_texts(shape))
    if count := sum(bool(text.strip()) for text in hidden):
        lost.append(f"{name}: {counted(count, 'hidden text')}")
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        found.append(_frame_text(slide.notes_slide.notes_text_frame))
    return "\n\n".join(filter(None, map(str.strip, found)))


def _is_hidden(shape: Any) -> bool:
    """Whether a shape was hidden in the list of shapes."""
    return shape._element._nvXxPr.cNvPr.get("hidden") in ("1", "true")


def _shape_texts(shape: Any) -> Iterator[str]:
    """The texts of a shape, of the cells of a table, and of the shapes in a group."""
    if hasattr(shape, "shapes"):
        for inner in shape.shapes:
            yield from _shape_texts(inner)
    elif getattr(shape, "has_table", False):
        yield "\n".join(_table_lines(shape.table))
    elif shape.has_text_frame:
        yield _frame_text(shape.text_frame)


def _table_lines(table: Any) -> Iterator[str]:
    rows = [
        [
            Cell(
                " ".join(_frame_text(cell.text_frame).split()),
                min(cell.span_width, len(table.columns)),
                cell.span_height,
                names=bool(table.first_row) and number == 0,
            )
            for cell in row.cells
            if not cell.is_spanned
        ]
        for number, row in enumerate(table.rows)
    ]
    return table_of(rows).lines()


def _frame_text(frame: Any) -> str:
    """The paragraphs of a text, each numbered item with its number."""
    counts: dict[tuple[int, str], int] = {}
    lines = list[str]()
    for paragraph in frame.paragraphs:
        element = paragraph._p
        level = paragraph.level
        numbered = element.find(f"{A}pPr/{A}buAutoNum")
        for key in [
            key for key in counts if key[0] > level or (key[0] == level and numbered is None)
        ]:
            del counts[key]
        mark = ""
        if numbered is not None:
            look = str(numbered.get("type"))
            start = int(numbered.get("startAt", "1"))
            counts[(level, look)] = counts.get((level, look), start - 1) + 1
            mark = f"{_number(counts[(level, look)], look)} "
        text = _paragraph_text(element)
        lines.append(f"{mark}{text}" if text.strip() else text)
    return "\n".join(lines)


def _number(number: int, look: str) -> str:
    kinds = (kind for name, kind in _KINDS.items() if look.startswith(name))
    kind: Kind = next(kinds, "decimal")
    around = next((form for end, form in _AROUND.items() if look.endswith(end)), "{}.")
    return around.format(number_text(number, kind))


def _paragraph_text(element: Any) -> str:
    parts = list[Part]()
    for child in element:
        if child.tag == f"{A}br":
            parts.append(("\n", Place.LINE))
        elif child.tag in (f"{A}r", f"{A}fld"):
            parts.append(_run(child))
        else:
            parts += ((formula_text(one), Place.LINE) for one in child.iter(f"{MATH}oMath"))
    return joined(parts)


def _run(run: Any) -> Part:
    """A text of one look, which may be raised, lowered or struck out."""
    text = (run.findtext(f"{A}t") or "").replace("\v", "\n")
    properties = run.find(f"{A}rPr")
    if properties is None:
        return text, Place.LINE
    if properties.get("strike", "noStrike") != "noStrike":
        text = struck(text)
    shift = str(properties.get("baseline", "0"))
    is_shifted = bool(shift.strip("0%"))
    lowers = shift.startswith("-")
    return text, Place.LINE if not is_shifted else Place.LOWERED if lowers else Place.RAISED
