"""The bytes of small files of every format that loaders read, made with the libraries that users
make them with.
"""

import io
import zipfile
from collections.abc import Sequence
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError
from ragkv.retrieval import Document, ParseLimits, load_bytes
from ragkv.retrieval.documents.loaders import check_not_blank, read_bytes


def load(
    file: Path,
    encoding: str | None = None,
    limits: ParseLimits = ParseLimits(),  # noqa: B008
) -> list[Document]:
    """The documents of a file. Raises the first error."""
    data = read_bytes(file)
    check_not_blank(file, data)
    found = list(load_bytes(file, data, encoding, limits))
    for error in found:
        if isinstance(error, DocumentError):
            raise error
    return [one for one in found if isinstance(one, Document)]


def pdf(*texts: str) -> bytes:
    """The smallest PDF with a line of text on each page."""
    return _pdf(
        [(f"({text})", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>") for text in texts]
    )


def pdf_mapping(unicode_hex: str) -> bytes:
    """A PDF that shows "AB" and says that its A means the UTF-16 `unicode_hex`."""
    table = (
        "1 begincodespacerange <00> <FF> endcodespacerange 1 beginbfchar <41> "
        f"<{unicode_hex}> endbfchar"
    )
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 3 0 R >>"
    return _pdf([("(AB)", font)], f"<< /Length {len(table)} >>\nstream\n{table}\nendstream")


def pdf_form(**values: str) -> bytes:
    """A page with a form that was filled in."""
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    return _pdf(
        [("(A form.)", font)],
        fields=[f"<< /FT /Tx /T ({n}) /V ({value}) >>" for n, value in values.items()],
    )


def _pdf(pages: list[tuple[str, str]], third: str = "null", fields: Sequence[str] = ()) -> bytes:
    """A PDF of pages with a string in a font each. `third` is object 3; fonts may refer to it."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    form = " ".join(f"{4 + 2 * len(pages) + i} 0 R" for i in range(len(fields)))
    objects = [f"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [{form}] >> >>"]
    objects += [f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>", third]
    for i, (string, font) in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td {string} Tj ET"
        rest = f"/MediaBox [0 0 612 792] /Resources << /Font << /F1 {font} >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R {rest} /Contents {5 + 2 * i} 0 R >>")
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    objects += fields
    out = "%PDF-1.4\n"
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    entries = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{entries}"
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return out.encode()


def word(body: str) -> bytes:
    """A Word file with this WordprocessingML in its body."""
    import docx as library
    from docx.oxml import parse_xml

    document = library.Document()
    own = document.element.body
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    for element in list(parse_xml(f"<w:body {space}>{body}</w:body>")):
        own.insert(len(own) - 1, element)
    return _saved(document)


def paragraph(text: str, style: str = "") -> str:
    """WordprocessingML of a paragraph."""
    named = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{named}<w:r><w:t>{text}</w:t></w:r></w:p>"


def cell(content: str, span: int = 1, merge: str = "") -> str:
    """WordprocessingML of a cell, over `span` columns, or the first ("restart") or next of cells
    merged downwards.
    """
    inner = content + paragraph("") if content.startswith("<w:tbl>") else paragraph(content)
    merged = f'<w:vMerge w:val="{merge}"/>' if merge else ""
    return f'<w:tc><w:tcPr><w:gridSpan w:val="{span}"/>{merged}</w:tcPr>{inner}</w:tc>'


def table(*rows: list[str]) -> str:
    """WordprocessingML of a table of texts, tables or cells."""
    made = (
        "".join(one if one.startswith(("<w:tc>", "<w:sdt>")) else cell(one) for one in row)
        for row in rows
    )
    return "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in made) + "</w:tbl>"


def docx() -> bytes:
    """A heading, a paragraph and a table."""
    import docx as library

    document = library.Document()
    document.core_properties.title = "The mill"
    document.add_heading("Founding", level=1)
    document.add_paragraph("The mill was founded by Ada Quill.")
    table = document.add_table(rows=2, cols=2)
    for row, values in zip(table.rows, (("part", "made of"), ("wheel", "oak")), strict=True):
        for cell, value in zip(row.cells, values, strict=True):
            cell.text = value
    return _saved(document)


def pptx() -> bytes:
    """Two slides, the second with notes."""
    import pptx as library

    presentation = library.Presentation()
    for title, body in (("The mill", "It makes paper."), ("The town", "It lies on a river.")):
        slide = presentation.slides.add_slide(presentation.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = body
    slide.notes_slide.notes_text_frame.text = "Say where it lies."
    return _saved(presentation)


def pptx_of(count: int) -> bytes:
    """A slide with `count` paragraphs."""
    import pptx as library

    presentation = library.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.placeholders[1].text = "\n".join(f"Paragraph {k} of it." for k in range(count))
    return _saved(presentation)


def xlsx_of(count: int) -> bytes:
    """A sheet with `count` rows."""
    import openpyxl

    book = openpyxl.Workbook()
    for k in range(count):
        book.active.append((f"part {k}", k))
    return _saved(book)


def xlsx() -> bytes:
    """Two sheets, the second without values."""
    import openpyxl

    book = openpyxl.Workbook()
    book.active.title = "People"
    for row in (("name", "born"), ("Ada Quill", 1790), (None, None), ("Bo Reed", 1801)):
        book.active.append(row)
    book.create_sheet("Empty")
    return _saved(book)


def epub_of(chapter: str) -> bytes:
    """A book of one chapter, in HTML."""
    container = """<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
        <rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
    package = """<package xmlns="http://www.idpf.org/2007/opf"><metadata/>
        <manifest><item id="a" href="a.xhtml"/></manifest><spine><itemref idref="a"/></spine></package>"""
    return zipped({"META-INF/container.xml": container, "book.opf": package, "a.xhtml": chapter})


def epub() -> bytes:
    """Two chapters, whose reading order is not that of their names."""
    container = """<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
        <rootfile full-path="text/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
    package = """<package xmlns="http://www.idpf.org/2007/opf"><metadata>
        <title xmlns="http://purl.org/dc/elements/1.1/">Of mills</title></metadata>
        <manifest><item id="a" href="a.xhtml"/><item id="b" href="b%20b.xhtml"/></manifest>
        <spine><itemref idref="b"/><itemref idref="a"/></spine></package>"""
    chapters = {
        "text/a.xhtml": "<html><body><p>The end.</p></body></html>",
        "text/b b.xhtml": "<html><body><h1>One</h1><p>The beginning.</p></body></html>",
    }
    return zipped({"META-INF/container.xml": container, "text/book.opf": package, **chapters})


def eml() -> bytes:
    """A mail with a plain body, an HTML one and an attachment."""
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = (
        "Wheel",
        "Ada <ada@example.org>",
        "bo@example.org",
    )
    message.set_content("The wheel is of oak, caf\u00e9 included.")
    message.add_alternative("<p>The wheel is of oak.</p>", subtype="html")
    message.add_attachment(
        b"\x00\x01", maintype="application", subtype="octet-stream", filename="plan.bin"
    )
    return message.as_bytes()


def zipped(files: dict[str, str | bytes]) -> bytes:
    """A ZIP archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def _saved(document: Any) -> bytes:
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()
