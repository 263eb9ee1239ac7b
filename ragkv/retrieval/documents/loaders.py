"""Loaders make documents of a file's bytes. They know file formats and nothing about splitting or
indexing.

A file that cannot be read is a `DocumentError` that says what is wrong, where, and what to do.
Parts that a loader could not read come as a value among the documents of the file. There is one
loader per format (`formats.py`), chosen by the file's bytes and its suffix (`signatures.py`).
"""

from pathlib import Path

from ragkv.errors import DocumentError

from ..ingested import Document
from .files import has_loader, kind_of
from .formats import KNOWN, loader_of
from .reading import UNLIMITED, FileContent, Loaded, ParseLimits
from .signatures import kind_by_bytes, unreadable_kind


def load_bytes(
    file: Path, data: bytes, encoding: str | None = None, limits: ParseLimits = UNLIMITED
) -> Loaded:
    """The documents in the contents of a file that has a loader. Raises `DocumentError`,
    `MissingExtraError`.

    An `encoding` overrules what the file declares; "auto" guesses it where the file declares none
    and is not UTF-8.
    """
    content = FileContent(file, data, encoding, limits)
    kind = kind_by_bytes(data, kind_of(file))
    if what := unreadable_kind(data, kind):
        raise DocumentError(
            f"{file} is {what}, whatever its name says. Save it in a format that can be read, or "
            "skip it."
        )
    for loaded in loader_of(kind)(content):
        if isinstance(loaded, Document):
            limits.check_document(str(file), loaded)
        yield loaded


def read_bytes(file: Path) -> bytes:
    """The bytes of a file. Raises `DocumentError` for what is no readable file or has no loader."""
    if not file.exists():
        raise DocumentError(f"Cannot read {file}: there is no such file or folder. Check the path.")
    if not has_loader(file):
        raise DocumentError(
            f"Cannot read {file}: no loader for {file.suffix!r}. Known: {KNOWN}. Convert it to one."
        )
    if not file.is_file():
        raise DocumentError(
            f"Cannot read {file}: neither a file nor a directory. Write it to a file first."
        )
    try:
        return file.read_bytes()
    except OSError as error:
        message = (
            f"Cannot read {file}: {error.strerror or error}. Check the path and its permissions."
        )
        raise DocumentError(message) from error


def check_not_blank(file: Path, data: bytes) -> None:
    """Raises `DocumentError` if a file holds nothing but white space."""
    if not data.strip():
        raise DocumentError(
            f"{file} is empty ({len(data)} bytes). Remove it, or skip what cannot be read."
        )
