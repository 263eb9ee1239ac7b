"""Loaders read files and directories into documents. They know file formats and nothing about splitting or indexing.

A file that cannot be read is a `DocumentError` that says what is wrong, where, and what to do. A caller that wants to
go on passes `on_error` and gets each error as a value. There is one loader per format, chosen by the file's suffix.
"""

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError, MissingExtraError

from ..values import Document
from .files import find_files, has_loader
from .html import declared_encoding, text_of
from .limits import UNLIMITED, ParseLimits
from .mail import load_mail
from .office import load_docx, load_epub, load_pptx, load_xlsx
from .reading import Loaded, Loader, decode, document_of, marked_encoding, parsing
from .tables import load_csv

logger = logging.getLogger(__name__)

OnError = Callable[[DocumentError], None]


def load_documents(
    paths: str | Path | Iterable[str | Path],
    *,
    encoding: str = "utf-8",
    on_error: OnError | None = None,
    limits: ParseLimits = UNLIMITED,
) -> Iterator[Document]:
    """The documents of files and directories, in order; directories are walked recursively, in sorted order.

    Inside a directory, hidden files, files without a loader and empty files are skipped (logged at info level). A path
    that is given itself must be readable. A document's id is the file's absolute path, or a JSON line's own `id`.
    Raises `DocumentError` at the first thing that cannot be read, or passes it to `on_error` and goes on.
    """
    for path in [paths] if isinstance(paths, str | Path) else paths:
        for loaded in _load_path(Path(path), encoding, limits):
            if isinstance(loaded, Document):
                yield loaded
            elif on_error is None:
                raise loaded
            else:
                on_error(loaded)


def _load_path(path: Path, encoding: str, limits: ParseLimits) -> Loaded:
    found = find_files([path], LOADERS, TEXT_NAMES)
    for file in found:
        if file.fate == "read":
            yield from _load_file(file.path, encoding, limits)
        elif file.fate == "failed":
            yield DocumentError(f"{file.path}: {file.reason}.")
        else:
            logger.info("Skipped %s: %s.", file.path, file.reason)
    if not any(file.fate == "read" for file in found):
        yield DocumentError(f"No documents under {path}: none of its files can be read. Known: {KNOWN}.")


def load_bytes(file: Path, data: bytes, encoding: str = "utf-8", limits: ParseLimits = UNLIMITED) -> Loaded:
    """The documents in the contents of a file that has a loader. Raises `DocumentError`, `MissingExtraError`."""
    for loaded in LOADERS.get(file.suffix.lower(), _load_text)(file, data, encoding, limits):
        if isinstance(loaded, Document):
            limits.check_text(str(file), loaded.text)
            limits.check_metadata(str(file), loaded.metadata)
        yield loaded


def _load_file(file: Path, encoding: str, limits: ParseLimits) -> Loaded:
    try:
        data = read_bytes(file)
        check_not_blank(file, data)
        yield from load_bytes(file, data, encoding, limits)
    except DocumentError as error:
        yield error


def read_bytes(file: Path) -> bytes:
    """The bytes of a file. Raises `DocumentError` for what is no readable file or has no loader."""
    if not file.exists():
        raise DocumentError(f"Cannot read {file}: there is no such file or folder. Check the path.")
    if file.is_dir():
        raise DocumentError(f"Cannot read {file}: it is a folder. Give it as a path of its own.")
    if not has_loader(file, LOADERS, TEXT_NAMES):
        raise DocumentError(f"Cannot read {file}: no loader for {file.suffix!r}. Known: {KNOWN}. Convert it to one.")
    if not file.is_file():
        raise DocumentError(f"Cannot read {file}: neither a file nor a directory. Write it to a file first.")
    try:
        return file.read_bytes()
    except OSError as error:
        message = f"Cannot read {file}: {error.strerror or error}. Check the path and its permissions."
        raise DocumentError(message) from error


def check_not_blank(file: Path, data: bytes) -> None:
    """Raises `DocumentError` if a file holds nothing but white space."""
    if not data.strip():
        raise DocumentError(f"{file} is empty ({len(data)} bytes). Remove it, or skip what cannot be read.")


def _load_text(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:  # noqa: ARG001 - see load_bytes
    yield document_of(file, decode(file, data, encoding), {})


def _load_html(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:
    declared = None if marked_encoding(data) else declared_encoding(data)
    text, title = text_of(decode(file, data, declared or encoding), limits)
    if not text:
        raise DocumentError(f"{file} holds no text outside scripts and styles. Save the rendered page, or remove it.")
    yield document_of(file, text, {"title": title} if title else {})


def _load_jsonl(file: Path, data: bytes, encoding: str, limits: ParseLimits) -> Loaded:
    """One document per line: `{"id": ..., "text": ..., "metadata": {...}}`; other keys become metadata."""
    lines = io.StringIO(decode(file, data, encoding), newline="\n")
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
    with parsing(file, "PDF"):
        pages = list(_page_texts(file, pypdf.PdfReader(io.BytesIO(data)), limits))
    text, starts = "", []
    for page in pages:
        starts.append(len(text))
        text += page.strip() + "\n\n"
    if not text.strip():
        raise DocumentError(f"{file} holds no text in {len(pages)} pages: scanned images? Run OCR on it first.")
    yield document_of(file, text.rstrip(), {}, tuple(starts))


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


# Read as plain text. The list holds the usual endings of source code, configuration and markup.
_TEXT_SUFFIXES = """.txt .text .md .markdown .rst .adoc .org .tex .log .json .xml .yaml .yml .toml .ini .cfg .conf
    .py .js .mjs .ts .jsx .tsx .css .scss .java .kt .scala .groovy .c .h .cc .cpp .cxx .hpp .cs .go .rs .swift .m .rb
    .php .pl .lua .r .jl .dart .ex .exs .erl .hs .ml .clj .lisp .sh .bash .zsh .fish .ps1 .bat .sql .proto .graphql
    .tf .cmake .gradle .vue .svelte"""
# Files without an ending that are text by custom.
_TEXT_NAMES = "readme license licence notice copying authors changelog changes makefile dockerfile"
TEXT_NAMES = frozenset(_TEXT_NAMES.split())
LOADERS: dict[str, Loader] = {
    **dict.fromkeys(_TEXT_SUFFIXES.split(), _load_text),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _load_html),
    **dict.fromkeys((".csv", ".tsv"), load_csv),
    ".jsonl": _load_jsonl,
    ".pdf": _load_pdf,
    ".docx": load_docx,
    ".pptx": load_pptx,
    ".xlsx": load_xlsx,
    ".epub": load_epub,
    ".eml": load_mail,
}
KNOWN = "text, source code, " + " ".join(suffix for suffix in LOADERS if LOADERS[suffix] is not _load_text)
