"""Recognises the format of a file by its bytes, because people rename files and programs give them
wrong endings.
"""

import io
import re
import zipfile

# The first bytes of a file say what it is.
SEEN_BYTES = 4096
# Parts of the archives that are documents.
_PARTS = {"word/": ".docx", "ppt/": ".pptx", "xl/": ".xlsx", "META-INF/container.xml": ".epub"}
_ARCHIVES = {
    ".docx": "word/",
    ".docm": "word/",
    ".dotx": "word/",
    ".dotm": "word/",
    ".pptx": "ppt/",
    ".pptm": "ppt/",
    ".xlsx": "xl/",
    ".xlsm": "xl/",
    ".xltx": "xl/",
    ".xltm": "xl/",
    ".epub": "META-INF/container.xml",
}
# Files whose bytes no loader reads as text.
_UNREADABLE = {
    b"\xd0\xcf\x11\xe0": "an Office file that is old (.doc, .xls, .ppt) or has a password",
    b"{\\rtf": "rich text (RTF)",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"\x1f\x8b": "an archive",
    b"7z\xbc\xaf": "an archive",
    b"Rar!\x1a\x07": "an archive",
    b"PK\x03\x04": "an archive",
    b"SQLite format 3\0": "a database",
}
_MAIL = re.compile(
    rb"^(?:Received|From|Message-ID):[ \t].*?^(?:Subject|Date|To):[ \t]", re.M | re.S | re.I
)


def kind_by_bytes(data: bytes, named: str) -> str:
    """The ending that a file should have. `named` is the one that it has, or "".

    Bytes decide between text and what is packed; which text it is, its name says if it has one.
    """
    if data.startswith(b"PK\x03\x04"):
        return _archive(data, named)
    head = data[:SEEN_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"%PDF-") and b" obj" in data:
        return ".pdf"
    if named and not _is_packed(named):
        return named
    if head[:9].lower().startswith((b"<!doctype", b"<html")) and b"<html" in head.lower():
        return ".html"
    is_mail = re.match(rb"[A-Za-z][A-Za-z-]*:[ \t]", head) and _MAIL.search(head)
    return ".eml" if is_mail else named


def unreadable_kind(data: bytes, kind: str) -> str:
    """What a file that should be of a kind is instead, in words; "" if it may be of that kind."""
    if _is_packed(kind) and data.startswith(b"PK\x03\x04"):
        return ""
    return next((what for begins, what in _UNREADABLE.items() if data.startswith(begins)), "")


def _is_packed(kind: str) -> bool:
    """Whether files with this ending are no text."""
    return kind == ".pdf" or kind in _ARCHIVES


def _archive(data: bytes, named: str) -> str:
    """An archive whose parts are those of its name is what its name says."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
        return named  # its loader says what is wrong with it
    found = {part for part in _PARTS if any(name.startswith(part) for name in names)}
    if _ARCHIVES.get(named) in found:
        return named
    return next((kind for part, kind in _PARTS.items() if part in found), named)
