"""How the rows of an index change. `ingestion.py` calls this, inside a transaction."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .embedders import Vectors
from .index_file import IN_USE, IndexFile, as_json
from .ingested import Document, FileRecord, digest
from .passages import Passage
from .retrievers import terms


@dataclass(frozen=True, slots=True, eq=False)
class IndexWrites:
    """Writes and deletes rows of an open file."""

    file: IndexFile

    def without_vectors(self, texts: Iterable[str]) -> list[str]:
        """The texts without vectors: first those among `texts`, then all others in use."""
        sql = "SELECT 1 FROM texts WHERE hash = ? AND vectors IS NOT NULL"
        new = [text for text in texts if not self.file.value(sql, digest(text))]
        old = self.file.rows(f"SELECT text FROM texts WHERE vectors IS NULL AND {IN_USE}")
        return list(dict.fromkeys([*new, *(row[0] for row in old)]))

    def _put_text(self, text: str) -> int:
        """The number of a text, which is stored if it is new. No passage need use it yet."""
        number: int | None = self.file.value(
            "SELECT number FROM texts WHERE hash = ?", digest(text)
        )
        if number is None:
            sql = "INSERT INTO texts (hash, text) VALUES (?, ?) RETURNING number"
            number = int(self.file.value(sql, digest(text), text))
            self.file.rows(
                "INSERT INTO terms (rowid, words) VALUES (?, ?)", (number, " ".join(terms(text)))
            )
        return number

    def put_vectors(self, texts: Iterable[str], vectors: Iterable[Vectors]) -> None:
        """Stores the vectors (W, D) of texts."""
        for text, several in zip(texts, vectors, strict=True):
            blob = np.ascontiguousarray(several, dtype="<f4").tobytes()
            self.file.rows(
                "UPDATE texts SET vectors = ? WHERE number = ?", (blob, self._put_text(text))
            )

    def put_document(
        self, document: Document, content_hash: str, passages: Iterable[Passage]
    ) -> None:
        """Adds or replaces a document and its passages."""
        self.delete_document(document.id)
        metadata = as_json(document.metadata)
        page_starts = as_json(document.page_starts)
        values = (document.id, content_hash, document.text, document.source, metadata, page_starts)
        self.file.rows("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)", values)
        sql = """INSERT INTO passages (id, document_id, text_number, span_start, span_end, page, section)
            VALUES (?, ?, ?, ?, ?, ?, ?)"""
        for one in passages:
            self.file.rows(
                sql,
                (one.id, document.id, self._put_text(one.text), *one.span, one.page, one.section),
            )

    def put_file(self, record: FileRecord) -> None:
        """Adds or replaces the record of a file."""
        values = (
            record.path,
            record.size,
            record.mtime_ns,
            record.digest,
            record.method,
            as_json(record.documents),
        )
        self.file.rows("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", values)

    def delete_document(self, document_id: str) -> None:
        """Deletes a document and its passages, and none of their texts."""
        self.file.rows("DELETE FROM documents WHERE id = ?", (document_id,))
        self.file.rows("DELETE FROM passages WHERE document_id = ?", (document_id,))

    def delete_unused_texts(self) -> None:
        """Deletes the texts that no passage uses, with their vectors and terms."""
        rows = self.file.rows(f"DELETE FROM texts WHERE NOT {IN_USE} RETURNING number")
        if rows:
            numbers = as_json([row[0] for row in rows])
            self.file.rows(
                "DELETE FROM terms WHERE rowid IN (SELECT value FROM json_each(?))", (numbers,)
            )
            # Only a merge takes deleted terms out of the full-text table: its secure-delete is
            # newer than SQLite 3.40.
            self.file.rows("INSERT INTO terms (terms) VALUES ('optimize')")

    def delete_file(self, path: str) -> None:
        """Deletes the record of a file."""
        self.file.rows("DELETE FROM files WHERE path = ?", (path,))
