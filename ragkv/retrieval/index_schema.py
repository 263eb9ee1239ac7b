"""Makes and opens the SQLite file of an index. `index_file.py` holds the open file.

The file holds documents, passages, vectors and terms. Nothing in it is pickled. It uses a rollback
journal, not a write-ahead log: one file, readable from a read-only directory, and in its old state
after a kill. Deleted text is overwritten (`secure_delete`), its terms leave the full-text table,
and the file shrinks. What is stored is linear in what was given: source and metadata once for a
document, one row for a text.
"""

import secrets
from contextlib import suppress
from pathlib import Path

from ragkv.errors import ConfigError, StoreError
from ragkv.runtime import create_private, make_private_folder

from .embedders import Embedder
from .index_file import IndexFile

# A higher `FORMAT` refuses the files of earlier versions.
FORMAT = "3"
FILE = "index.sqlite"

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (id TEXT PRIMARY KEY, hash TEXT NOT NULL, text TEXT NOT NULL, source TEXT NOT NULL,
    metadata TEXT NOT NULL, page_starts TEXT NOT NULL);
CREATE TABLE texts (number INTEGER PRIMARY KEY AUTOINCREMENT, hash TEXT NOT NULL UNIQUE, text TEXT NOT NULL,
    vectors BLOB);
CREATE TABLE passages (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, document_id TEXT NOT NULL,
    text_number INTEGER NOT NULL, span_start INTEGER NOT NULL, span_end INTEGER NOT NULL, page INTEGER, section TEXT);
CREATE INDEX passages_document ON passages (document_id);
CREATE INDEX passages_text ON passages (text_number);
CREATE TABLE files (path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, digest TEXT NOT NULL,
    method TEXT NOT NULL, documents TEXT NOT NULL);
CREATE VIRTUAL TABLE terms USING fts5(words, tokenize = "ascii tokenchars '_'");
"""


class NoIndexError(StoreError):
    """There is no index here, or one that is being made and has no tables yet."""


def open_file(
    directory: Path | None, read_only: bool = False, embedder: Embedder | None = None
) -> IndexFile:
    """Opens the file in `directory`, which is made if it is not there; `None`: in memory. Raises
    `NoIndexError` if there is none to read, and `ConfigError` if it holds vectors of another
    embedder.
    """
    try:
        return _opened(directory, read_only, embedder)
    except StoreError:
        if directory is None or not read_only or not (directory / f"{FILE}-journal").exists():
            raise
    # only a writer can undo a transaction in which a process was killed
    _opened(directory, False, embedder).close()
    return _opened(directory, read_only, embedder)


def _opened(directory: Path | None, read_only: bool, embedder: Embedder | None) -> IndexFile:
    file = IndexFile(_uri(directory, read_only), directory, read_only)
    try:
        if not _has_tables(file):
            _create_tables(file)
        _check_format(file)
        if embedder is not None:
            _check_embedder(file, embedder)
    except BaseException:
        file.close()
        raise
    return file


def _check_format(file: IndexFile) -> None:
    found = file.fact("format")
    if found != FORMAT:
        raise StoreError(
            f"The index at {file.directory} has format {found}, this ragkv reads {FORMAT}. "
            "Ingest into a new directory."
        )


def _check_embedder(file: IndexFile, embedder: Embedder) -> None:
    """Raises `ConfigError` if the file holds vectors of another embedder."""
    recorded = file.fact("embedder_id")
    if recorded not in (None, embedder.id):
        name = file.fact("embedder_name")
        dimension = file.fact("dimension")
        raise ConfigError(
            f"The index at {file.directory} holds vectors of {name} ({dimension} dimensions, "
            f"{recorded}), not of {embedder.name} ({embedder.id}). "
            "Open it with that embedder, or ingest into a new directory."
        )


def _uri(directory: Path | None, read_only: bool) -> str:
    """What SQLite opens: a file that is there, unless that failed."""
    if directory is None:
        return ":memory:"
    file = directory / FILE
    with suppress(OSError):  # SQLite says what is wrong
        if not file.exists():
            _make(file, read_only)
    return file.absolute().as_uri() + ("?mode=ro" if read_only else "")


def _make(file: Path, read_only: bool) -> None:
    """An empty file in a folder of its owner's."""
    if read_only:
        raise _no_index(file.parent)
    try:
        make_private_folder(file.parent)
    except OSError as error:
        raise StoreError(
            f"Cannot make a directory for an index at {file.parent}: {error}."
        ) from error
    create_private(file)


def _create_tables(file: IndexFile) -> None:
    if file.read_only:
        raise _no_index(file.directory)
    file.rows("PRAGMA auto_vacuum = FULL")
    with file.transaction():
        if not _has_tables(file):  # another process may have created them
            for statement in SCHEMA.split(";"):
                file.rows(statement)
            put_fact(file, "format", FORMAT)
            put_revision(file)


def put_fact(file: IndexFile, name: str, value: str) -> None:
    """Records a fact about the index."""
    file.rows("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def put_revision(file: IndexFile) -> None:
    """Names the current state of texts and vectors."""
    put_fact(file, "revision", secrets.token_hex(8))


def _has_tables(file: IndexFile) -> bool:
    return file.value("SELECT 1 FROM sqlite_master WHERE name = 'facts'") is not None


def _no_index(directory: Path | None) -> NoIndexError:
    return NoIndexError(f"No index at {directory}. Ingest documents into it first.")
