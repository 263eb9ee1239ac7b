"""The index on disk: one SQLite file, the only truth. Nothing in it is pickled.

A rollback journal and not a write-ahead log: one file, readable from a read-only directory, and after a kill the old
state. What retrievers derive from it (term scores) lies beside it as snapshots named after the revision they were
made from, and may be deleted at any time. Deleted text is overwritten (`secure_delete`).
"""

import json
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ragkv.errors import StoreError, StoreReadOnlyError

from .document import Document, Passage, digest
from .retrievers import Numbers, Vectors

FORMAT = "1"
FILE = "index.sqlite"

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (id TEXT PRIMARY KEY, hash TEXT NOT NULL, text TEXT NOT NULL, source TEXT NOT NULL,
    metadata TEXT NOT NULL, page_starts TEXT NOT NULL);
CREATE TABLE texts (number INTEGER PRIMARY KEY AUTOINCREMENT, hash TEXT NOT NULL UNIQUE, text TEXT NOT NULL,
    vectors BLOB);
CREATE TABLE passages (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, document_id TEXT NOT NULL,
    text_number INTEGER NOT NULL, span_start INTEGER NOT NULL, span_end INTEGER NOT NULL, source TEXT NOT NULL,
    metadata TEXT NOT NULL);
CREATE INDEX passages_document ON passages (document_id);
CREATE INDEX passages_text ON passages (text_number);
"""

PASSAGE = """SELECT passages.id, document_id, text, span_start, span_end, source, metadata, text_number
    FROM passages JOIN texts ON number = text_number"""
IN_USE = "EXISTS (SELECT 1 FROM passages WHERE text_number = number)"


class Database:
    """Documents, their passages, the distinct texts of these, and their vectors. Thread-safe."""

    def __init__(self, directory: Path | None, read_only: bool = False) -> None:
        self.directory = directory
        self.read_only = read_only
        self._lock = threading.RLock()
        with self._explained():
            self._connection = self._connect()
            self._connection.executescript("PRAGMA secure_delete = ON; PRAGMA cache_spill = OFF;")
            if not self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
                self._create()
        if (found := self.fact("format")) != FORMAT:
            raise StoreError(f"The index at {directory} has format {found}, this ragkv reads {FORMAT}. Ingest anew.")

    def _connect(self) -> sqlite3.Connection:
        if self.directory is None:
            where = ":memory:"
        elif self.read_only:
            if not (self.directory / FILE).exists():
                raise StoreError(f"No index at {self.directory}. Ingest documents into it first.")
            where = f"{(self.directory / FILE).absolute().as_uri()}?mode=ro"
        else:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"Cannot make a directory for an index at {self.directory}: {error}.") from error
            where = (self.directory / FILE).absolute().as_uri()
        return sqlite3.connect(where, uri=True, timeout=30, isolation_level=None, check_same_thread=False)

    def _create(self) -> None:
        if self.read_only:
            raise StoreError(f"No index at {self.directory}. Ingest documents into it first.")
        with self.transaction():
            if not self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
                for statement in SCHEMA.split(";"):
                    self._connection.execute(statement)
                self.set_fact("format", FORMAT)
                self.new_revision()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Holds the lock; SQLite's errors become ours."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                why = str(error)
                if "readonly" in why:
                    raise StoreReadOnlyError(f"The index at {self.directory} cannot be written: {why}.") from error
                if "disk is full" in why:
                    hint = "Free some space: the index is as it was before."
                elif "not a database" in why or "malformed" in why:
                    hint = "The file is damaged: delete the directory and ingest again."
                else:
                    hint = "Check that the directory can be read and written, and that nobody else holds it."
                raise StoreError(f"The index at {self.directory} failed: {why}. {hint}") from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or nothing, also after a kill. Others wait; keep it short."""
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._explained():
            return self._connection.execute(sql, parameters).fetchall()

    def close(self) -> None:
        """Twice is harmless."""
        with self._lock:
            self._connection.close()

    # Facts about the index

    def fact(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def set_fact(self, name: str, value: str) -> None:
        self._rows("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def revision(self) -> str:
        """A random name of the present state of texts and vectors."""
        return self.fact("revision") or ""

    def new_revision(self) -> None:
        self.set_fact("revision", secrets.token_hex(8))

    # Reading

    def document_hash(self, document_id: str) -> str | None:
        rows = self._rows("SELECT hash FROM documents WHERE id = ?", (document_id,))
        return rows[0][0] if rows else None

    def document_ids(self) -> list[str]:
        return [row[0] for row in self._rows("SELECT id FROM documents ORDER BY rowid")]

    def document(self, document_id: str) -> Document | None:
        rows = self._rows("SELECT text, source, metadata, page_starts FROM documents WHERE id = ?", (document_id,))
        if not rows:
            return None
        text, source, metadata, page_starts = rows[0]
        return Document(document_id, text, source, json.loads(metadata), tuple(json.loads(page_starts)))

    def passages(self, document_id: str | None = None) -> list[Passage]:
        """Of one document, or all, in order."""
        if document_id is None:
            return [_passage(row) for row in self._rows(f"{PASSAGE} ORDER BY place")]
        return [_passage(row) for row in self._rows(f"{PASSAGE} WHERE document_id = ? ORDER BY place", (document_id,))]

    def passages_of_texts(
        self, numbers: Sequence[int], condition: str, parameters: Sequence[Any]
    ) -> dict[int, list[Passage]]:
        """The passages of each text that fulfil `condition`, in order of ingestion; texts without one are left out."""
        sql = f"{PASSAGE} WHERE text_number IN (SELECT value FROM json_each(?)) AND {condition} ORDER BY place"
        found: dict[int, list[Passage]] = {}
        for row in self._rows(sql, [_json(numbers), *parameters]):
            found.setdefault(row[-1], []).append(_passage(row))
        return found

    def text_numbers(self, condition: str, parameters: Sequence[Any]) -> Numbers:
        """The texts that have a passage which fulfils `condition`."""
        rows = self._rows(f"SELECT DISTINCT text_number FROM passages WHERE {condition}", parameters)
        return np.array([row[0] for row in rows], dtype=np.int64)

    def texts(self) -> tuple[str, Numbers, list[str]]:
        """The revision, and every text in use."""
        with self._explained():
            self._connection.execute("BEGIN")
            try:
                revision = self.revision()
                rows = self._rows(f"SELECT number, text FROM texts WHERE {IN_USE} ORDER BY number")
            finally:
                self._connection.execute("COMMIT")
        return revision, np.array([row[0] for row in rows], dtype=np.int64), [row[1] for row in rows]

    def vectors(self, dimension: int) -> tuple[Numbers, Vectors]:
        """The rows (N,), (N, D) of every text in use that has vectors."""
        rows = self._rows(f"SELECT number, vectors FROM texts WHERE vectors IS NOT NULL AND {IN_USE} ORDER BY number")
        joined = b"".join(row[1] for row in rows)
        vectors = np.frombuffer(joined, dtype="<f4").astype(np.float32, copy=False).reshape(-1, dimension)  # (N, D)
        counts = [len(row[1]) // (4 * dimension) for row in rows]
        return np.repeat(np.array([row[0] for row in rows], dtype=np.int64), counts), vectors

    def texts_without_vectors(self) -> list[str]:
        return [row[0] for row in self._rows(f"SELECT text FROM texts WHERE vectors IS NULL AND {IN_USE}")]

    def has_vectors(self, text: str) -> bool:
        return bool(self._rows("SELECT 1 FROM texts WHERE hash = ? AND vectors IS NOT NULL", (digest(text),)))

    def counts(self) -> dict[str, int]:
        sql = f"""SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM passages),
            (SELECT count(*) FROM texts WHERE {IN_USE}),
            (SELECT count(*) FROM texts WHERE vectors IS NOT NULL AND {IN_USE})"""
        return dict(zip(("documents", "passages", "texts", "embedded_texts"), self._rows(sql)[0], strict=True))

    # Writing, inside a transaction

    def put_vectors(self, texts: Iterable[str], vectors: Iterable[Vectors]) -> None:
        """Vectors (W, D) of texts, which need not be in use yet."""
        for text, several in zip(texts, vectors, strict=True):
            blob = np.ascontiguousarray(several, dtype="<f4").tobytes()
            self._rows(
                "INSERT INTO texts (hash, text, vectors) VALUES (?, ?, ?) "
                "ON CONFLICT (hash) DO UPDATE SET vectors = excluded.vectors",
                (digest(text), text, blob),
            )

    def put_document(self, document: Document, content_hash: str, passages: Iterable[Passage]) -> None:
        """Add or replace a document and its passages."""
        self.delete_document(document.id)
        values = (
            document.id,
            content_hash,
            document.text,
            document.source,
            _json(document.metadata),
            _json(document.page_starts),
        )
        self._rows("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)", values)
        for passage in passages:
            key = digest(passage.text)
            self._rows("INSERT OR IGNORE INTO texts (hash, text) VALUES (?, ?)", (key, passage.text))
            self._rows(
                "INSERT INTO passages (id, document_id, text_number, span_start, span_end, source, metadata) "
                "VALUES (?, ?, (SELECT number FROM texts WHERE hash = ?), ?, ?, ?, ?)",
                (passage.id, document.id, key, *passage.span, passage.source, _json(passage.metadata)),
            )

    def delete_document(self, document_id: str) -> None:
        self._rows("DELETE FROM documents WHERE id = ?", (document_id,))
        self._rows("DELETE FROM passages WHERE document_id = ?", (document_id,))

    def sweep(self) -> None:
        """Drop the texts, and their vectors, that no passage uses."""
        self._rows(f"DELETE FROM texts WHERE NOT {IN_USE}")

    def in_use(self, text: str) -> bool:
        return bool(self._rows(f"SELECT 1 FROM texts WHERE hash = ? AND {IN_USE}", (digest(text),)))


def _passage(row: Sequence[Any]) -> Passage:
    identity, document_id, text, start, end, source, metadata, _ = row
    return Passage(identity, document_id, text, (start, end), source, json.loads(metadata))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
