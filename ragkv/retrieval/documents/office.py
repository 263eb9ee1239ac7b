"""Word, PowerPoint, Excel and EPUB files. All four are ZIP archives of XML.

Before anything is parsed, the sizes that the archive declares are added up and checked: `zipfile`,
which all parsers used here read with, never inflates more than declared. No parser resolves XML
entities: python-pptx and this file tell lxml so; for the others, which use expat, an archive that
declares entities is refused (Office writes none).
"""

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from lxml import etree

from ragkv.errors import DocumentError

from .html import declared_encoding, text_of
from .reading import FileContent, Loaded, decode, part
from .tables import named_lines

EXTRA = "office"
# `WORD_STYLES` are headings besides those that mammoth knows.
WORD_STYLES = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => h2:fresh"
CORE = "docProps/core.xml"


def load_docx(content: FileContent) -> Loaded:
    """The text with headings, lists, tables and notes, by way of mammoth's HTML. Headers and
    footers are left out.
    """
    mammoth = content.need("mammoth", "mammoth", EXTRA)
    with content.parsing("DOCX"):
        archive = _archive(content, by_expat=True)
        pictures = mammoth.images.img_element(lambda _: {})
        made = mammoth.convert_to_html(
            io.BytesIO(content.data), style_map=WORD_STYLES, convert_image=pictures
        )
        text, _ = text_of(made.value)
        title = _title(archive, CORE)
    found = (re.search(r"element was ignored: (.+)", message.message) for message in made.messages)
    lost = [
        f"elements of the kind {kind}" for kind in sorted({one.group(1) for one in found if one})
    ]
    yield content.document(text, {"format": "markdown", "title": title}, lost)


def load_pptx(content: FileContent) -> Loaded:
    """The texts, tables and notes of each slide; slides count as pages."""
    pptx = content.need("pptx", "python-pptx", EXTRA)
    texts = list[str]()
    lost = list[str]()
    with content.parsing("PPTX"):
        archive = _archive(content)
        slides = pptx.Presentation(io.BytesIO(content.data)).slides
        for number, slide in enumerate(slides, start=1):
            with part(lost, f"slide {number}"):
                found = [text for shape in slide.shapes for text in _shape_texts(shape)]
                if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
                    found.append(slide.notes_slide.notes_text_frame.text)
                texts.append("\n\n".join(filter(None, map(str.strip, found))).replace("\v", "\n"))
        title = _title(archive, CORE)
    yield content.document(texts, {"title": title}, lost)


def _shape_texts(shape: Any) -> Iterator[str]:
    """The texts of a shape, of the cells of a table, and of the shapes in a group."""
    if hasattr(shape, "shapes"):
        for inner in shape.shapes:
            yield from _shape_texts(inner)
    elif getattr(shape, "has_table", False):
        yield "\n".join(
            "\t".join(" ".join(cell.text.split()) for cell in row.cells) for row in shape.table.rows
        )
    elif shape.has_text_frame:
        yield shape.text_frame.text


def load_xlsx(content: FileContent) -> Loaded:
    """Every sheet under its name as a heading; each row is a line that names its columns. Formulas:
    their values.
    """
    openpyxl = content.need("openpyxl", "openpyxl", EXTRA)
    sheets = list[str]()
    lost = list[str]()
    with content.parsing("XLSX"):
        archive = _archive(content, by_expat=True)
        book = openpyxl.load_workbook(io.BytesIO(content.data), read_only=True, data_only=True)
        for sheet in book.worksheets:
            with part(lost, f"sheet {sheet.title}"):
                if lines := "\n".join(lines_of(_rows(sheet))):
                    sheets.append(f"# {sheet.title}\n\n{lines}")
        title = _title(archive, CORE)
    yield content.document("\n\n".join(sheets), {"format": "markdown", "title": title}, lost)


def _rows(sheet: Any) -> Iterator[list[str]]:
    sheet.reset_dimensions()  # a file may declare a million empty columns
    for row in sheet.iter_rows(values_only=True):
        yield ["" if value is None else str(value) for value in row]


def load_epub(content: FileContent) -> Loaded:
    """The chapters in reading order, as text."""
    chapters = list[str]()
    lost = list[str]()
    with content.parsing("EPUB"):
        archive = _archive(content)
        package_path = str(
            _xml(archive, "META-INF/container.xml").find(".//{*}rootfile").get("full-path")
        )
        package = _xml(archive, package_path)
        items = {
            item.get("id"): str(item.get("href"))
            for item in package.iterfind(".//{*}manifest/{*}item")
        }
        for number, entry in enumerate(package.iterfind(".//{*}spine/{*}itemref"), start=1):
            with part(lost, f"chapter {number}"):
                name = posixpath.normpath(
                    posixpath.join(
                        posixpath.dirname(package_path), unquote(items[entry.get("idref")])
                    )
                )
                data = archive.read(name)
                chapters.append(
                    text_of(decode(name, data, content.encoding, declared_encoding(data)))[0]
                )
        title = _title(archive, package_path)
    yield content.document(
        "\n\n".join(filter(None, chapters)), {"format": "markdown", "title": title}, lost
    )


def _archive(content: FileContent, by_expat: bool = False) -> zipfile.ZipFile:
    """The archive, after its declared sizes were checked; if it is read `by_expat`, after a look
    for entities, too.
    """
    archive = zipfile.ZipFile(io.BytesIO(content.data))
    inflated = sum(info.file_size for info in archive.infolist())
    content.limits.check(
        "inflated_bytes", inflated, f"{content.path}: the size of its unpacked contents in bytes"
    )
    for name in archive.namelist() if by_expat else ():
        # UTF-16, too
        if name.endswith((".xml", ".rels")) and b"<!ENTITY" in archive.read(name).replace(
            b"\0", b""
        ):
            raise DocumentError(
                f"{content.path} declares XML entities in {name}, as attacks do. Save it anew in "
                "Office."
            )
    return archive


def _xml(archive: zipfile.ZipFile, name: str) -> Any:
    return etree.fromstring(
        archive.read(name), etree.XMLParser(resolve_entities=False, no_network=True)
    )


def _title(archive: zipfile.ZipFile, name: str) -> str:
    """The title that an archive has in its XML file `name`; "" if it has none that can be read."""
    try:
        return " ".join(
            _xml(archive, name).findtext(".//{http://purl.org/dc/elements/1.1/}title", "").split()
        )
    except (KeyError, etree.XMLSyntaxError):
        return ""
