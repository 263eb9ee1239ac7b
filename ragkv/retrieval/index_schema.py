"""The index on disk: one SQLite file with documents, passages, vectors and terms. Nothing in it is
pickled. Here it is made and opened; `index_file.py` has it when it is open.

It uses a rollback journal, not a write-ahead log: one file, readable from a read-only directory,
and in its old state after a kill. Deleted text is overwritten (`secure_delete`), its terms leave
the full-text table, and the file shrinks. What is stored is linear in what was given: source and
metadata once for a document, one row for a text.
"""

from contextlib import suppress
from pathlib import Path

from ragkv.errors import ConfigError, StoreError
from ragkv.runtime import create_private, make_private_folder

from .embedders import Embedder
from .index_file import IndexFile
from .index_writes import IndexWrites

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
    """Opens or creates the file in `directory`; `None`: in memory. Raises `ConfigError` if it holds
    vectors of another embedder than the one given.
    """
    try:
        file = _opened(directory, read_only)
    except StoreError:
        if directory is None or not read_only or not (directory / f"{FILE}-journal").exists():
            raise
        # only a writer can undo a transaction in which a process was killed
        _opened(directory, read_only=False).close()
        file = _opened(directory, read_only)
    recorded = file.fact("embedder_id")
    if embedder is not None and recorded not in (None, embedder.id):
        name = file.fact("embedder_name")
        dimension = file.fact("dimension")
        file.close()
        raise ConfigError(
            f"The index at {directory} holds vectors of {name} ({dimension} dimensions, "
            f"{recorded}), "
            f"not of {embedder.name} ({embedder.id}). "
            "Open it with that embedder, or ingest into a new directory."
        )
    return file


def _opened(directory: Path | None, read_only: bool) -> IndexFile:
    file = IndexFile(_uri(directory, read_only), directory, read_only)
    try:
        if not _has_tables(file):
            _create_tables(file)
        found = file.fact("format")
        if found != FORMAT:
            raise StoreError(
                f"The index at {directory} has format {found}, this ragkv reads {FORMAT}. "
                "Ingest into a new directory."
            )
    except BaseException:
        file.close()
        raise
    return file


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
            writes = IndexWrites(file)
            writes.put_fact("format", FORMAT)
            writes.put_revision()


def _has_tables(file: IndexFile) -> bool:
    return file.value("SELECT 1 FROM sqlite_master WHERE name = 'facts'") is not None


def _no_index(directory: Path | None) -> NoIndexError:
    return NoIndexError(f"No index at {directory}. Ingest documents into it first.")
