"""The index: documents and queries go in, hits come out."""

import logging
from collections.abc import Callable
from pathlib import Path

from ragkv.errors import ConfigError, InputError, ModelError
from ragkv.runtime import Check, no_check
from ragkv.runtime.arguments import check_kind

from .database import HOW_TO_EMBED, Database, notice_of
from .embedders import Embedder
from .filters import EVERYTHING, Where, condition_of
from .index_file import IndexReads
from .index_schema import open_file
from .index_writes import IndexWrites
from .ingested import Vectors
from .ingestion import Ingestion
from .passages import Hit
from .retrievers import RETRIEVERS, Query, dense, rank
from .splitter import Splitter

logger = logging.getLogger(__name__)

# Of a query `QUERY_CHARS` are searched; an embedder reads far fewer.
QUERY_CHARS = 10_000


class Index(Database):
    """A database that is searched, and that a `writer` puts documents into. Thread-safe."""

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

        Ingesting needs a `splitter`. Without an `embedder` BM25 works alone. `before_write` is
        called before documents are written. At the embedder the index waits for the turn of its
        `owner`, a tenant.
        """
        file = open_file(None if directory is None else Path(directory), read_only, embedder)
        super().__init__(file, IndexReads(file))
        writes = IndexWrites(file)
        self.writer = Ingestion(file, self, writes, splitter, embedder, before_write, owner)
        self._embedder = embedder
        self._owner = owner
        if embedder is None and self.notice:
            logger.warning(self.notice)

    @property
    def notice(self) -> str | None:
        """Why retrieval is worse than it could be, in one sentence; `None` if it is not."""
        return notice_of(self, self._embedder)

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
            retriever = "bm25" if self._embedder is None else "fused"
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
        with self.file.reading(
            check
        ):  # else a deletion might remove a hit between ranking and reading
            ranked = rank(self.reads, rankings, wanted, k)
            found = self.reads.first_passages([scored.number for scored in ranked], condition)
        return [
            Hit(found[scored.number], scored.score, place)
            for place, scored in enumerate(ranked, start=1)
        ]

    def _vector_of(self, query: str) -> Vectors:
        """The unit vector (D,) of a query. Raises `InputError` without an embedder."""
        if self._embedder is None:
            raise InputError(
                "Dense retrieval needs an embedder, and this index was opened without one: "
                "search with "
                f'retriever="bm25". {HOW_TO_EMBED}'
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
