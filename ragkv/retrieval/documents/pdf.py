"""PDF: the text by pages, then the values of form fields. A page that cannot be read costs this
page.
"""

import io
from collections.abc import Iterator
from typing import Any

from .reading import FileContent, Loaded, part


def load_pdf(content: FileContent) -> Loaded:
    """One document; sources name the page."""
    pypdf = content.need("pypdf", "pypdf", "pdf")
    lost = list[str]()
    with content.parsing("PDF"):
        reader = pypdf.PdfReader(io.BytesIO(content.data))
        pages = list(_page_texts(content, reader, lost))
        with part(lost, "the form"):
            if fields := "\n".join(_field_values(reader)):
                pages[-1] = f"{pages[-1].strip()}\n\n{fields}"
    yield content.document(pages, {}, lost)


def _page_texts(content: FileContent, reader: Any, lost: list[str]) -> Iterator[str]:
    """The text of each page. The limits are checked before a page's text is extracted, which is the
    slow part.
    """
    limits = content.limits
    inflated = 0
    chars = 0
    for number, page in enumerate(reader.pages, start=1):
        text = ""
        with part(lost, f"page {number}"):
            if (contents := page.get_contents()) is not None:
                inflated += len(contents.get_data())
                limits.check(
                    "inflated_bytes",
                    inflated,
                    f"{content.path}: the decompressed size of its pages in bytes",
                )
            text = page.extract_text()
            chars += len(text)
            limits.check("document_chars", chars, f"{content.path}: the number of characters")
        yield text


def _field_values(reader: Any) -> Iterator[str]:
    """What a form was filled in with, as "name: value"."""
    for name, field in (reader.get_fields() or {}).items():
        value = str(field.value if field.value is not None else "").removeprefix("/").strip()
        if value and value != "Off":
            yield f"{name}: {value}"
