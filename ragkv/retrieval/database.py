"""What an index holds beside what a search reads: documents, their passages and files, and how they
are written. `look_into` reads an index that other processes may write.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from ragkv.errors import StoreError
from ragkv.runtime import FileState, sqlite_files

from .index_file import FILE, IndexFile, NoIndexError
from .index_reads import IN_USE, PASSAGE, as_json
from .passages import Passage
from .retrievers import terms
from .values import Document, DocumentSummary, FileRecord, IndexStats, Vectors, digest


class Database(IndexFile):
    """Documents, their passages, the distinct texts of the passages, and the texts' vectors and
    terms. Thread-safe.
    """

    def document_hashes(self, document_ids: Iterable[str]) -> dict[str, str]:
        """The content hashes of documents; unknown ids are left out."""
        sql = "SELECT id, hash FROM documents WHERE id IN (SELECT value FROM json_each(?))"
        return dict(self._rows(sql, (as_json(list(document_ids)),)))

    def document_ids(self) -> list[str]:
        """Every document id, in order of ingestion."""
        return [row[0] for row in self._rows("SELECT id FROM documents ORDER BY rowid")]

    def document(self, document_id: str) -> Document | None:
        """A document as it was ingested."""
        rows = self._rows(
            "SELECT text, source, metadata, page_starts FROM documents WHERE id = ?", (document_id,)
        )
        if not rows:
            return None
        text, source, metadata, page_starts = rows[0]
        return Document(
            document_id, text, source, json.loads(metadata), tuple(json.loads(page_starts))
        )

    def passages(self, document_id: str | None = None) -> list[Passage]:
        """The passages of one document, or all, in order."""
        condition, parameters = (
            ("1", ()) if document_id is None else ("document_id = ?", (document_id,))
        )
        rows = self._rows(f"{PASSAGE} WHERE {condition} ORDER BY place", parameters)
        return [passage for _, passage in self._passages(rows)]

    def document_page(self, after: int, limit: int) -> list[DocumentSummary]:
        """The next `limit` documents in order of ingestion, after the position `after`; 0: from the
        beginning.
        """
        sql = """SELECT id, source, metadata, length(text),
            (SELECT count(*) FROM passages WHERE document_id = documents.id), rowid
            FROM documents WHERE rowid > ? ORDER BY rowid LIMIT ?"""
        return [
            DocumentSummary(document_id, source, json.loads(metadata), *counts)
            for document_id, source, metadata, *counts in self._rows(sql, (after, limit))
        ]

    def file_record(self, path: str) -> FileRecord | None:
        """What is known of a file that was ingested, by its absolute path."""
        rows = self._rows("SELECT * FROM files WHERE path = ?", (path,))
        if not rows:
            return None
        path, size, mtime_ns, found, method, documents = rows[0]
        return FileRecord(path, size, mtime_ns, found, method, json.loads(documents))

    def file_digests(self) -> dict[str, str]:
        """The absolute paths of the files that were ingested, sorted, and the digests of their bytes."""
        return dict(self._rows("SELECT path, digest FROM files ORDER BY path"))

    def texts_of(self, numbers: Sequence[int]) -> dict[int, str]:
        """The texts of these numbers, in order; unknown numbers are left out."""
        sql = (
            "SELECT number, text FROM texts WHERE number IN (SELECT value FROM json_each(?)) "
            "ORDER BY number"
        )
        return dict(self._rows(sql, (as_json(list(numbers)),)))

    def held(self, texts: Iterable[str]) -> set[str]:
        """Those of `texts` that are passages of exactly this text."""
        by_hash = {digest(text): text for text in texts}
        sql = f"SELECT hash FROM texts WHERE hash IN (SELECT value FROM json_each(?)) AND {IN_USE}"
        return {by_hash[row[0]] for row in self._rows(sql, (as_json(list(by_hash)),))}

    def stats(self) -> IndexStats:
        """What the index holds."""
        sql = f"""SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM passages),
            (SELECT count(*) FROM texts WHERE {IN_USE}),
            (SELECT count(*) FROM texts WHERE vectors IS NOT NULL AND {IN_USE}),
            (SELECT value FROM facts WHERE name = 'embedder_name'),
            (SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'dimension')"""
        return IndexStats(*self._rows(sql)[0])

    # Writing, inside a transaction

    def _without_vectors(self, texts: Iterable[str]) -> list[str]:
        """Those of `texts` that have no vectors, then all others in use that have none."""
        sql = "SELECT 1 FROM texts WHERE hash = ? AND vectors IS NOT NULL"
        new = [text for text in texts if not self._value(sql, digest(text))]
        old = self._rows(f"SELECT text FROM texts WHERE vectors IS NULL AND {IN_USE}")
        return list(dict.fromkeys([*new, *(row[0] for row in old)]))

    def _put_text(self, text: str) -> int:
        """The number of a text, which is stored if it is new. No passage need use it yet."""
        number: int | None = self._value("SELECT number FROM texts WHERE hash = ?", digest(text))
        if number is None:
            sql = "INSERT INTO texts (hash, text) VALUES (?, ?) RETURNING number"
            number = int(self._value(sql, digest(text), text))
            self._rows(
                "INSERT INTO terms (rowid, words) VALUES (?, ?)", (number, " ".join(terms(text)))
            )
        return number

    def _put_vectors(self, texts: Iterable[str], vectors: Iterable[Vectors]) -> None:
        """Stores the vectors (W, D) of texts."""
        for text, several in zip(texts, vectors, strict=True):
            blob = np.ascontiguousarray(several, dtype="<f4").tobytes()
            self._rows(
                "UPDATE texts SET vectors = ? WHERE number = ?", (blob, self._put_text(text))
            )

    def _put_document(
        self, document: Document, content_hash: str, passages: Iterable[Passage]
    ) -> None:
        """Adds or replaces a document and its passages."""
        self._delete_document(document.id)
        metadata = as_json(document.metadata)
        page_starts = as_json(document.page_starts)
        values = (document.id, content_hash, document.text, document.source, metadata, page_starts)
        self._rows("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)", values)
        sql = """INSERT INTO passages (id, document_id, text_number, span_start, span_end, page, section)
            VALUES (?, ?, ?, ?, ?, ?, ?)"""
        for one in passages:
            self._rows(
                sql,
                (one.id, document.id, self._put_text(one.text), *one.span, one.page, one.section),
            )

    def _put_file(self, record: FileRecord) -> None:
        """Adds or replaces the record of a file."""
        values = (
            record.path,
            record.size,
            record.mtime_ns,
            record.digest,
            record.method,
            as_json(record.documents),
        )
        self._rows("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", values)

    def _delete_document(self, document_id: str) -> None:
        self._rows("DELETE FROM documents WHERE id = ?", (document_id,))
        self._rows("DELETE FROM passages WHERE document_id = ?", (document_id,))

    def _delete_unused_texts(self) -> None:
        """Deletes the texts that no passage uses, with their vectors and terms."""
        rows = self._rows(f"DELETE FROM texts WHERE NOT {IN_USE} RETURNING number")
        if rows:
            numbers = as_json([row[0] for row in rows])
            self._rows(
                "DELETE FROM terms WHERE rowid IN (SELECT value FROM json_each(?))", (numbers,)
            )
            # Only a merge takes deleted terms out of the full-text table: its secure-delete is
            # newer than SQLite 3.40.
            self._rows("INSERT INTO terms (terms) VALUES ('optimize')")


@contextmanager
def look_into(directory: Path) -> Iterator[Database | None]:
    """The database in `directory` for a few reads, `None` if there is none, or none yet."""
    try:
        database = Database(directory, read_only=True) if index_bytes(directory) else None
    except NoIndexError:
        database = None
    except StoreError:
        if index_bytes(directory):
            raise
        database = None  # another process has deleted it meanwhile
    with database or nullcontext() as found:
        yield found


def index_bytes(directory: Path) -> int:
    """How many bytes the database in `directory` takes; 0 if there is none."""
    try:
        return (directory / FILE).stat().st_size
    except OSError:
        return 0


def state_of(directory: Path) -> FileState | None:
    """A value that every transaction on the database in `directory` changes; `None` if there is
    none.
    """
    try:
        return sqlite_files.state_of(directory / FILE)
    except OSError:
        return None
