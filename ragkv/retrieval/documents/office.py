"""Word, PowerPoint, Excel and EPUB files. All four are ZIP archives of XML.

Before anything is parsed, the sizes that the archive declares are added up and checked: `zipfile`, which all parsers
used here read with, never inflates more than declared. No parser resolves XML entities: lxml is told so by python-docx
and python-pptx, and defusedxml, which openpyxl takes if it is there, refuses them.
"""

import io
import posixpath
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ragkv.errors import DocumentError, MissingExtraError

from .html import text_of
from .limits import ParseLimits
from .reading import Loaded, document_of, parsing
from .tables import lines_of

EXTRA = "office"
_CONTAINER = "META-INF/container.xml"
_NAMES = {"c": "urn:oasis:names:tc:opendocument:xmlns:container", "o": "http://www.idpf.org/2007/opf"}
_TITLE = "{http://purl.org/dc/elements/1.1/}title"


def load_docx(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - XML names its own
    """Paragraphs and tables in order. Headings become Markdown headings; headers, footers and notes are left out."""
    try:
        import docx  # an extra
    except ImportError as error:
        raise MissingExtraError("python-docx", EXTRA, f"Reading {file}") from error
    with parsing(file, "DOCX"):
        _check_archive(file, data, limits)
        document = docx.Document(io.BytesIO(data))
        blocks = [_block(block) for block in document.iter_inner_content()]
        title = document.core_properties.title
    yield _described(file, "\n\n".join(filter(None, blocks)), {"format": "markdown"}, title)


def _block(block: Any) -> str:
    """A paragraph, with its level if it is a heading, or the rows of a table."""
    if hasattr(block, "rows"):
        return "\n".join("\t".join(" ".join(cell.text.split()) for cell in row.cells) for row in block.rows).strip()
    text, style = block.text.strip(), str(getattr(block.style, "name", "") or "")
    level = style.removeprefix("Heading ")
    if text and (style == "Title" or (style != level and level.isdigit())):
        return f"{'#' * min(6, int(level) if level.isdigit() else 1)} {' '.join(text.split())}"
    return str(text)


def load_pptx(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - XML names its own
    """The texts, tables and notes of each slide; slides count as pages."""
    try:
        import pptx  # an extra
    except ImportError as error:
        raise MissingExtraError("python-pptx", EXTRA, f"Reading {file}") from error
    text, starts = "", []
    with parsing(file, "PPTX"):
        _check_archive(file, data, limits)
        presentation = pptx.Presentation(io.BytesIO(data))
        limits.check("pages", len(presentation.slides), f"{file}: the number of slides")
        for slide in presentation.slides:
            starts.append(len(text))
            parts = [part for shape in slide.shapes for part in _shape_texts(shape)]
            if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
                parts.append(slide.notes_slide.notes_text_frame.text)
            if slide_text := "\n\n".join(filter(None, (part.strip() for part in parts))):
                text += slide_text.replace("\v", "\n") + "\n\n"
        title = presentation.core_properties.title
    yield _described(file, text.rstrip(), {}, title, tuple(start for start in starts if start < len(text.rstrip())))


def _shape_texts(shape: Any) -> Iterator[str]:
    """The texts of a shape, of the cells of a table, and of the shapes in a group."""
    if hasattr(shape, "shapes"):
        for inner in shape.shapes:
            yield from _shape_texts(inner)
    elif getattr(shape, "has_table", False):
        yield "\n".join("\t".join(" ".join(cell.text.split()) for cell in row.cells) for row in shape.table.rows)
    elif shape.has_text_frame:
        yield shape.text_frame.text


def load_xlsx(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - XML names its own
    """Every sheet under its name as a heading; each row is a line that names its columns. Formulas: their values."""
    try:
        import openpyxl  # an extra
    except ImportError as error:
        raise MissingExtraError("openpyxl", EXTRA, f"Reading {file}") from error
    _need_defusedxml(file)
    with parsing(file, "XLSX"):
        _check_archive(file, data, limits)
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        sheets = [(sheet.title, "\n".join(lines_of(_rows(file, sheet, limits)))) for sheet in book.worksheets]
        title = book.properties.title
    text = "\n\n".join(f"# {name}\n\n{lines}" for name, lines in sheets if lines)
    yield _described(file, text, {"format": "markdown"}, title)


def _rows(file: Path, sheet: Any, limits: ParseLimits) -> Iterator[list[str]]:
    sheet.reset_dimensions()  # a file may declare a million empty columns
    for number, row in enumerate(sheet.iter_rows(values_only=True), start=1):
        limits.check("lines", number, f"{file}: the number of rows of a sheet")
        yield ["" if value is None else str(value) for value in row]


def load_epub(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - XML names its own
    """The chapters in reading order, as text."""
    _need_defusedxml(file)
    from defusedxml.ElementTree import fromstring

    with parsing(file, "EPUB"), _check_archive(file, data, limits) as archive:
        package_path = fromstring(archive.read(_CONTAINER)).find(".//c:rootfile", _NAMES).get("full-path")
        package = fromstring(archive.read(package_path))
        items = {item.get("id"): item.get("href") for item in package.iterfind(".//o:manifest/o:item", _NAMES)}
        spine = [items[entry.get("idref")] for entry in package.iterfind(".//o:spine/o:itemref", _NAMES)]
        folder = posixpath.dirname(package_path)
        names = [posixpath.normpath(posixpath.join(folder, unquote(name))) for name in spine]
        chapters = [text_of(archive.read(name).decode("utf-8-sig"), limits)[0] for name in names]
        title = package.findtext(f".//{_TITLE}")
    yield _described(file, "\n\n".join(filter(None, chapters)), {}, title)


def _need_defusedxml(file: Path) -> None:
    try:
        import defusedxml  # noqa: F401 - an extra
    except ImportError as error:
        raise MissingExtraError("defusedxml", EXTRA, f"Reading {file}") from error


def _check_archive(file: Path, data: bytes, limits: ParseLimits) -> zipfile.ZipFile:
    """The archive, after its declared sizes were checked."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    inflated = sum(info.file_size for info in archive.infolist())
    limits.check("inflated_bytes", inflated, f"{file}: the size of its unpacked contents in bytes")
    return archive


def _described(file: Path, text: str, metadata: dict[str, Any], title: str | None, starts: tuple[int, ...] = ()) -> Any:
    if not text.strip():
        raise DocumentError(f"{file} holds no text. Does it consist of pictures? Remove it, or skip it.")
    named = {"title": " ".join(title.split())} if title and title.strip() else {}
    return document_of(file, text, {**metadata, **named}, starts)
