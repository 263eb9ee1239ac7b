"""Loaders read files and directories into documents. They know file formats and nothing about splitting or indexing.

A file that cannot be read is a `DocumentError` that says what is wrong, where, and what to do. A caller that wants to
go on passes `on_error` and gets each error as a value. There is one loader per format, chosen by the file's suffix.
"""

import codecs
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError, DocumentLimitError, MissingExtraError

from .html import declared_encoding, text_of
from .limits import UNLIMITED, ParseLimits
from .values import Document

logger = logging.getLogger(__name__)

Loaded = Iterator[Document | DocumentError]  # what a loader could read, and why it could not read the rest
OnError = Callable[[DocumentError], None]


def load_documents(
    paths: str | Path | Iterable[str | Path],
    *,
    encoding: str = "utf-8",
    on_error: OnError | None = None,
    limits: ParseLimits = UNLIMITED,
) -> Iterator[Document]:
    """The documents of files and directories, in order; directories are walked recursively, in sorted order.

    Inside a directory, hidden files and suffixes without a loader are skipped (logged at info level). A path that is
    given itself must be readable. A document's id is the file's absolute path, or a JSON line's own `id`.
    Raises `DocumentError` at the first thing that cannot be read, or passes it to `on_error` and goes on.
    """
    for path in [paths] if isinstance(paths, str | Path) else paths:
        for file in _files(Path(path)):
            for loaded in [file] if isinstance(file, DocumentError) else _load_file(file, encoding, limits):
                if isinstance(loaded, Document):
                    yield loaded
                elif on_error is None:
                    raise loaded
                else:
                    on_error(loaded)


def _files(path: Path) -> Iterator[Path | DocumentError]:
    if not path.is_dir():
        yield path
        return
    found = False
    unreadable: list[OSError] = []
    files = [Path(folder, name) for folder, _, names in os.walk(path, onerror=unreadable.append) for name in names]
    for error in unreadable:
        yield DocumentError(f"Cannot list {error.filename}: {error.strerror}. Check its permissions.")
    for file in sorted(files):
        inside = file.relative_to(path)
        if any(part.startswith(".") for part in inside.parts) or not file.is_file():
            continue
        if file.suffix.lower() in LOADERS:
            found = True
            yield file
        else:
            logger.info("Skipped %s: no loader for %r.", file, file.suffix)
    if not found:
        yield DocumentError(f"No documents under {path}: no file there ends in {' '.join(LOADERS)}.")


def load_bytes(file: Path, data: bytes, encoding: str = "utf-8", limits: ParseLimits = UNLIMITED) -> Loaded:
    """The documents in the contents of a file, by its suffix, which has a loader. Raises `DocumentError`."""
    for loaded in LOADERS[file.suffix.lower()](file, data, encoding, limits):
        if isinstance(loaded, Document):
            limits.check_text(str(file), loaded.text)
            limits.check_metadata(str(file), loaded.metadata)
        yield loaded


def _load_file(file: Path, encoding: str, limits: ParseLimits) -> Loaded:
    try:
        yield from load_bytes(file, _read(file), encoding, limits)
    except DocumentError as error:
        yield error


def _read(file: Path) -> bytes:
    """The bytes of a file. Raises `DocumentError` for what is no readable file or has no loader."""
    if not file.exists():
        raise DocumentError(f"Cannot read {file}: there is no such file or folder. Check the path.")
    if file.suffix.lower() not in LOADERS:
        known = " ".join(LOADERS)
        raise DocumentError(f"Cannot read {file}: no loader for {file.suffix!r}. Known: {known}. Convert it to one.")
    if not file.is_file():
        raise DocumentError(f"Cannot read {file}: neither a file nor a directory. Write it to a file first.")
    try:
        data = file.read_bytes()
    except OSError as error:
        message = f"Cannot read {file}: {error.strerror or error}. Check the path and its permissions."
        raise DocumentError(message) from error
    if not data.strip():
        raise DocumentError(f"{file} is empty ({len(data)} bytes). Remove it, or skip what cannot be read.")
    return data


def _load_text(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - see load_bytes
    yield _document(file, _decode(file, data, encoding), {})


def _load_html(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:
    declared = None if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE)) else declared_encoding(data)
    text, title = text_of(_decode(file, data, declared or encoding), limits)
    if not text:
        raise DocumentError(f"{file} holds no text outside scripts and styles. Save the rendered page, or remove it.")
    yield _document(file, text, {"title": title} if title else {})


def _load_jsonl(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:
    """One document per line: `{"id": ..., "text": ..., "metadata": {...}}`; other keys become metadata."""
    lines = io.StringIO(_decode(file, data, encoding), newline="\n")
    for number, line in enumerate(lines, start=1):
        limits.check("lines", number, f"{file}: the number of lines")
        if line.strip():
            try:
                yield _from_json(file, number, line.rstrip("\n"))
            except DocumentError as error:
                yield error


def _from_json(file: Path, number: int, line: str) -> Document:
    def bad(why: str) -> DocumentError:
        return DocumentError(f'{file}, line {number}: {why}. Each line is {{"id": ..., "text": ..., "metadata": ...}}.')

    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise bad(f"not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise bad(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise bad(f"a JSON {type(record).__name__}, not an object")
    text = record.pop("text", None)
    if not isinstance(text, str) or not text.strip():
        raise bad(f"`text` is {text!r}, not a text")
    given, source, metadata = record.pop("id", None), record.pop("source", None), record.pop("metadata", None) or {}
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
        raise bad(f"`id` is {given!r}, neither a string nor an integer")
    if not isinstance(metadata, dict):
        raise bad(f"`metadata` is {metadata!r}, not an object")
    path = str(file.absolute())
    document_id = f"{path}#{number}" if given is None else str(given)
    return Document(document_id, text, path if source is None else str(source), {**record, **metadata})


def _load_pdf(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - PDFs say theirs
    try:
        import pypdf  # an extra
    except ImportError as error:
        raise MissingExtraError("pypdf", "pdf", f"Reading {file}") from error
    try:
        pages = list(_page_texts(file, pypdf.PdfReader(io.BytesIO(data)), limits))
    except (DocumentLimitError, MemoryError):
        raise
    except Exception as error:  # pypdf raises many kinds on damaged files, RecursionError and KeyError among them
        raise DocumentError(f"Cannot read {file} as PDF: {error}. Is it complete, and not encrypted?") from error
    text, starts = "", []
    for page in pages:
        starts.append(len(text))
        text += page.strip() + "\n\n"
    if not text.strip():
        raise DocumentError(f"{file} holds no text in {len(pages)} pages: scanned images? Run OCR on it first.")
    yield _document(file, text.rstrip(), {}, tuple(starts))


def _page_texts(file: Path, reader: Any, limits: ParseLimits) -> Iterator[str]:
    """The text of each page. The limits are checked before a page's text is extracted, which is the slow part."""
    limits.check("pages", len(reader.pages), f"{file}: the number of pages")
    inflated = chars = 0
    for page in reader.pages:
        if (contents := page.get_contents()) is not None:
            inflated += len(contents.get_data())
            limits.check("inflated_bytes", inflated, f"{file}: the decompressed size of its pages in bytes")
        text = page.extract_text()
        chars += len(text)
        limits.check("document_chars", chars, f"{file}: the number of characters")
        yield text


def _document(file: Path, text: str, metadata: dict[str, Any], page_starts: tuple[int, ...] = ()) -> Document:
    path = str(file.absolute())
    return Document(id=path, text=text, source=path, metadata=metadata, page_starts=page_starts)


def _decode(file: Path, data: bytes, encoding: str) -> str:
    """The text of `data` with line ends as "\\n"; a byte order mark overrides `encoding`."""
    if data.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    elif data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in data and "16" not in encoding and "32" not in encoding:
        position = data.index(0)
        raise DocumentError(f"{file} looks binary: zero byte at offset {position}. Convert it to text, or skip it.")
    try:
        text = data.decode(encoding)
    except LookupError as error:
        message = f"{file}: unknown encoding {encoding!r}. Name one Python knows, such as latin-1."
        raise DocumentError(message) from error
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{file} is not {encoding}: byte {data[error.start]:#04x} at offset {error.start}. "
            f"Convert it (iconv -f latin1 -t utf-8), or name its encoding."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


Loader = Callable[[Path, bytes, str, ParseLimits], Loaded]  # file, its bytes, the encoding to assume, limits
LOADERS: dict[str, Loader] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown"), _load_text),
    **dict.fromkeys((".html", ".htm"), _load_html),
    ".jsonl": _load_jsonl,
    ".pdf": _load_pdf,
}
