"""HTML files, in the encoding that they declare."""

import re

from ..reading import FileContent, Loaded
from .page import text_of

# A page declares its encoding within `DECLARED_BYTES`.
DECLARED_BYTES = 4096


def declared_encoding(data: bytes) -> str | None:
    """The encoding that a page declares near its start, or `None`. UTF-16 declared in ASCII is a
    mistake for UTF-8.
    """
    head = re.sub(rb"<!--.*?-->", b"", data[:DECLARED_BYTES], flags=re.DOTALL)
    found = re.search(
        rb"""<\?xml[^>]+encoding\s*=\s*["']([\w.:-]+)""", head, re.IGNORECASE
    ) or re.search(rb"""<meta\b[^>]+charset\s*=\s*["']?\s*([\w.:-]+)""", head, re.IGNORECASE)
    label = found.group(1).decode("ascii", "replace") if found else None
    return "utf-8" if label and label.lower().startswith(("utf-16", "utf16", "unicode")) else label


def load_html(content: FileContent) -> Loaded:
    """One document, read in the encoding that the page declares."""
    page = text_of(content.text(declared_encoding(content.data)))
    yield content.document(page.text, {"format": "markdown", "title": page.title}, page.lost)
