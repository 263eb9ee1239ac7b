"""PDF: the text by pages, then the values of form fields. A page that cannot be read costs this
page.

PDFium reads the text. It knows what was drawn twice, what a ligature means (ActualText), and where
a word is broken at the end of a line. pypdf reads forms, notes, and which layers are off.
"""

import ctypes
import io
import threading
from collections.abc import Iterator
from typing import Any

from ragkv.runtime import counted

from ..reading import FileContent, Loaded, part
from .letters import page_text, unbroken

# PDFium is not made for threads.
_PDFIUM = threading.Lock()
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
        pages = unbroken(texts)
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
                text = page_text(pdfium, page)
                typed, count = _annotations(beside)
                text = "\n\n".join(filter(None, (text.strip(), *typed)))
                notes += count
            page.close()
            yield text
    if notes:
        lost.append(counted(notes, "comment"))
    if left_out:
        lost.append(f"layers that are off: {', '.join(sorted(off))}")


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
