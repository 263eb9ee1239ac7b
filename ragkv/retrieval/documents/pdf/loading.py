"""PDF: the text by pages, then the values of form fields. A page that cannot be read is left out,
and the others are read.

PDFium reads the text. It knows what was drawn twice, what a ligature means (ActualText), and where
a word is broken at the end of a line. pypdf reads forms, notes, and which layers are off.
"""

import io
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ragkv.runtime import counted

from ..reading import FileContent, Loaded, part
from .layers import Layers, leave_out, raw_entry, without_layers
from .letters import page_text, unbroken

# PDFium is not made for threads.
_PDFIUM = threading.Lock()
# Annotations that are text of the page, and those by which readers comment on it.
TYPED = "/FreeText"
NOTES = ("/Text", "/Highlight", "/Underline", "/StrikeOut", "/Squiggly", "/Caret")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file that is read by two libraries."""

    content: FileContent
    data: bytes  # the file, with hidden layers named
    reader: Any  # of pypdf
    pdfium: Any
    layers: Layers


def load_pdf(content: FileContent) -> Loaded:
    """One document; sources name the page."""
    pypdf = content.need("pypdf", "pypdf", "pdf")
    pdfium = content.need("pypdfium2", "pypdfium2", "pdf")
    lost = list[str]()
    with content.parsing("PDF"):
        reader = pypdf.PdfReader(io.BytesIO(content.data))
        layers = Layers({})
        data = content.data
        with part(lost, "layers"):
            layers = Layers(reader.trailer["/Root"])
            data = without_layers(pypdf, data, layers) if layers.exist else data
        opened = _Opened(content, data, reader, pdfium, layers)
        with _PDFIUM:
            texts = list(content.bounded(_page_texts(opened, lost)))
        pages = unbroken(texts)
        with part(lost, "the form"):
            if fields := "\n".join(content.bounded(_field_values(reader))):
                pages[-1] = f"{pages[-1].strip()}\n\n{fields}"
    yield content.document(pages, {}, lost)


def _page_texts(opened: _Opened, lost: list[str]) -> Iterator[str]:
    """The text of each page. The limits are checked before a page's text is extracted, which is the
    slow part.
    """
    inflated = 0
    notes = 0
    layers = opened.layers
    with opened.pdfium.PdfDocument(opened.data) as document:
        pages = zip(document, opened.reader.pages, strict=False)
        for number, (page, beside) in enumerate(pages, start=1):
            text = ""
            with part(lost, f"page {number}"):
                if (stream := beside.get_contents()) is not None:
                    inflated += len(stream.get_data())
                    opened.content.limits.check(
                        "inflated_bytes",
                        inflated,
                        f"{opened.content.path}: the decompressed size of its pages in bytes",
                    )
                if opened.data is not opened.content.data:
                    layers.told.update(leave_out(opened.pdfium, page))
                text = page_text(opened.pdfium, page)
                typed, count = _annotations(beside, layers)
                text = "\n\n".join(filter(None, (text.strip(), *typed)))
                notes += count
            page.close()
            yield text
    if notes:
        lost.append(counted(notes, "comment"))
    if layers.told:
        lost.append(f"layers that are off: {', '.join(sorted(layers.told))}")


def _annotations(page: Any, layers: Layers) -> tuple[list[str], int]:
    """The texts that were typed onto a page, and how many comments of readers it has."""
    typed = list[str]()
    notes = 0
    for reference in page.get("/Annots") or ():
        annotation = reference.get_object()
        text = str(annotation.get("/Contents") or "").replace("\r", "\n").strip()
        if names := layers.hiding(raw_entry(annotation, "/OC")):
            layers.told.add(names)
            continue
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
