"""Lists the documents and passages of an index. Ranking uses none of it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .index_file import IN_USE, IndexFile, as_json
from .ingested import Document, DocumentSummary, IndexStats, digest
from .passages import Passage, read_passages


@dataclass(frozen=True, slots=True, eq=False)
class IndexContents:
    """What an index holds, as its file has it now."""

    file: IndexFile

    def stats(self) -> IndexStats:
        """The counts."""
        sql = f"""SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM passages),
            (SELECT count(*) FROM texts WHERE {IN_USE}),
            (SELECT count(*) FROM texts WHERE vectors IS NOT NULL AND {IN_USE}),
            (SELECT value FROM facts WHERE name = 'embedder_name'),
            (SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'dimension')"""
        return IndexStats(*self.file.rows(sql)[0])

    def document_ids(self) -> list[str]:
        """Every document id, in order of ingestion."""
        return [row[0] for row in self.file.rows("SELECT id FROM documents ORDER BY rowid")]

    def document_page(self, after: int, limit: int) -> list[DocumentSummary]:
        """The next `limit` documents in order of ingestion, after the position `after`; 0: from the
        beginning.
        """
        sql = """SELECT id, source, metadata, length(text),
            (SELECT count(*) FROM passages WHERE document_id = documents.id), rowid
            FROM documents WHERE rowid > ? ORDER BY rowid LIMIT ?"""
        return [
            DocumentSummary(document_id, source, json.loads(metadata), *counts)
            for document_id, source, metadata, *counts in self.file.rows(sql, (after, limit))
        ]

    def document(self, document_id: str) -> Document | None:
        """A document as it was ingested."""
        rows = self.file.rows(
            "SELECT text, source, metadata, page_starts FROM documents WHERE id = ?", (document_id,)
        )
        if not rows:
            return None
        text, source, metadata, page_starts = rows[0]
        return Document(
            document_id, text, source, json.loads(metadata), tuple(json.loads(page_starts))
        )

    def document_hashes(self, document_ids: Iterable[str]) -> dict[str, str]:
        """The content hashes of documents; unknown ids are left out."""
        sql = "SELECT id, hash FROM documents WHERE id IN (SELECT value FROM json_each(?))"
        return dict(self.file.rows(sql, (as_json(list(document_ids)),)))

    def positions(self, document_ids: Iterable[str]) -> dict[str, int]:
        """A number for each document that is higher for later ones; unknown ids are left out."""
        sql = "SELECT id, rowid FROM documents WHERE id IN (SELECT value FROM json_each(?))"
        return dict(self.file.rows(sql, (as_json(list(document_ids)),)))

    def passages(self, document_id: str | None = None) -> list[Passage]:
        """The passages of one document, or all, in order."""
        condition, parameters = (
            ("1", ()) if document_id is None else ("document_id = ?", (document_id,))
        )
        rows = read_passages(self.file, f"{condition} ORDER BY place", parameters)
        return [passage for _, passage in rows]

    def texts(self, numbers: Sequence[int]) -> dict[int, str]:
        """The texts of these numbers, in order; unknown numbers are left out."""
        sql = (
            "SELECT number, text FROM texts WHERE number IN (SELECT value FROM json_each(?)) "
            "ORDER BY number"
        )
        return dict(self.file.rows(sql, (as_json(list(numbers)),)))

    def held(self, texts: Iterable[str]) -> set[str]:
        """The texts among `texts` that are the whole text of a passage."""
        by_hash = {digest(text): text for text in texts}
        sql = f"SELECT hash FROM texts WHERE hash IN (SELECT value FROM json_each(?)) AND {IN_USE}"
        return {by_hash[row[0]] for row in self.file.rows(sql, (as_json(list(by_hash)),))}
