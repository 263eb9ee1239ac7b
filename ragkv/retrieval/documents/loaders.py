"""Loaders make documents of a file's bytes. They know file formats and nothing about splitting or
indexing.

A file that cannot be read is a `DocumentError` that says what is wrong, where, and what to do; what
a loader could not read of a file comes as a value among its documents. There is one loader per
format, chosen by the file's suffix.
"""

from pathlib import Path

from ragkv.errors import DocumentError

from ..values import Document
from .files import KNOWN, has_loader
from .reading import UNLIMITED, FileContent, Loaded, Loader, ParseLimits


def load_bytes(
    file: Path, data: bytes, encoding: str | None = None, limits: ParseLimits = UNLIMITED
) -> Loaded:
    """The documents in the contents of a file that has a loader. Raises `DocumentError`,
    `MissingExtraError`.

    An `encoding` overrules what the file declares; "auto" guesses it where the file declares none
    and is not UTF-8.
    """
    for loaded in _loader(file.suffix.lower())(FileContent(file, data, encoding, limits)):
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


def _loader(suffix: str) -> Loader:
    """The loader of a format, which is imported with its first file."""
    match suffix:
        case ".html" | ".htm" | ".xhtml":
            from .html import load_html as load
        case ".csv" | ".tsv":
            from .delimited import load_csv as load
        case ".jsonl":
            from .json_lines import load_jsonl as load
        case ".pdf":
            from .pdf import load_pdf as load
        case ".docx":
            from .word import load_docx as load
        case ".pptx":
            from .slides import load_pptx as load
        case ".xlsx":
            from .sheets import load_xlsx as load
        case ".epub":
            from .epub import load_epub as load
        case ".eml":
            from .mail import load_mail as load
        case _:
            load = _load_text
    return load


def _load_text(content: FileContent) -> Loaded:
    yield content.document(content.text(), {})
