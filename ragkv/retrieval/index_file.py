"""The index on disk: one SQLite file with documents, passages, vectors and terms. Nothing in it is
pickled. Here it is made, opened, changed as a whole and closed; `index_reads.py` reads it.

It uses a rollback journal, not a write-ahead log: one file, readable from a read-only directory,
and in its old state after a kill. Deleted text is overwritten (`secure_delete`), its terms leave
the full-text table, and the file shrinks. What is stored is linear in what was given: source and
metadata once for a document, one row for a text.
"""

import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.runtime import Check, create_private, make_private_folder, no_check

from .index_reads import IndexReads

# A higher `FORMAT` refuses the files of earlier versions.
FORMAT = "3"
FILE = "index.sqlite"
# SQLite asks every `STEPS` of its machine whether to go on: about every millisecond.
STEPS = 2000

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


class IndexFile(IndexReads):
    """The file, opened. Thread-safe."""

    def __init__(self, directory: Path | None, read_only: bool = False) -> None:
        """Opens or creates the file; `None`: in memory."""
        self.directory = directory
        self.read_only = read_only
        self._lock = threading.RLock()
        self._vectors = None
        self._check = no_check
        self._stopped = None
        try:
            self._open()
        except StoreError:
            if directory is None or not read_only or not (directory / f"{FILE}-journal").exists():
                raise
            # only a writer can undo a transaction in which a process was killed
            IndexFile(directory).close()
            self._open()

    def _open(self) -> None:
        with self._locked():
            self._connection = self._connect()
            self._connection.executescript("PRAGMA secure_delete = ON; PRAGMA cache_spill = OFF;")
            self._connection.set_progress_handler(self._must_stop, STEPS)
            if not self._has_tables():
                self._create()
        if (found := self.fact("format")) != FORMAT:
            self.close()
            raise StoreError(
                f"The index at {self.directory} has format {found}, this ragkv reads {FORMAT}. "
                "Ingest into a new directory."
            )

    def _connect(self) -> sqlite3.Connection:
        if self.directory is None:
            uri = ":memory:"
        else:
            file = self.directory / FILE
            uri = file.absolute().as_uri() + ("?mode=ro" if self.read_only else "")
            with suppress(OSError):  # SQLite says what is wrong
                if not file.exists():
                    self._make(file)
        return sqlite3.connect(
            uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False
        )

    def _make(self, file: Path) -> None:
        """An empty file in a folder of its owner's."""
        if self.read_only:
            raise self._no_index()
        try:
            make_private_folder(file.parent)
        except OSError as error:
            raise StoreError(
                f"Cannot make a directory for an index at {file.parent}: {error}."
            ) from error
        create_private(file)

    def _create(self) -> None:
        if self.read_only:
            raise self._no_index()
        self._connection.execute("PRAGMA auto_vacuum = FULL")
        with self.transaction():
            if not self._has_tables():  # another process may have created them
                for statement in SCHEMA.split(";"):
                    self._connection.execute(statement)
                self._set_fact("format", FORMAT)
                self._new_revision()

    def _has_tables(self) -> bool:
        return (
            self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone()
            is not None
        )

    def _no_index(self) -> "NoIndexError":
        return NoIndexError(f"No index at {self.directory}. Ingest documents into it first.")

    @contextmanager
    def transaction(self, check: Check = no_check) -> Iterator[None]:
        """Commits all of the block or nothing, even after a kill. Other writers wait: keep the
        block short.

        What `check` raises ends it, until it is being committed.
        """
        with self._locked():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                with self._stopped_by(check):
                    yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Closes the connection. Closing twice is harmless."""
        with self._lock:
            self._vectors = None
            self._connection.close()

    def _set_fact(self, name: str, value: str) -> None:
        self._rows("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _new_revision(self) -> None:
        """Names the current state of texts and vectors."""
        self._set_fact("revision", secrets.token_hex(8))
