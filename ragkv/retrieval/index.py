"""The index: documents go in, and the passages that match a query come out.

An `Index` is one SQLite file (`index_file.py`). `retrievers.py` ranks its texts,
`index_contents.py` lists what it holds, and `ingestion.py` changes it. It knows no models,
tokenizers or KV.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name

from ragkv.errors import ConfigError, InputError, ModelError
from ragkv.registry import RETRIEVERS
from ragkv.runtime import Check, Closing, no_check
from ragkv.runtime.outside import check_kind

from .embedders import HOW_TO_EMBED, NO_EMBEDDER, Embedder, Vectors
from .filters import EVERYTHING, Condition, Where, condition_of
from .index_contents import IndexContents
from .index_file import as_json
from .index_schema import open_file
from .index_writes import IndexWrites
from .ingestion import Ingestion
from .passages import Hit, Passage, read_passages
from .retrievers import IndexTexts, Query, Ranking, dense, rank
from .splitter import Splitter

logger = logging.getLogger(__name__)

# Of a query `QUERY_CHARS` are searched; an embedder reads far fewer.
QUERY_CHARS = 10_000
MAX_K = 2**63 - 1  # SQLite's greatest number


class Index(Closing):
    """Documents, their passages, the texts of these, and what finds them. Thread-safe."""

    def __init__(
        self,
        directory: str | Path | None,
        splitter: Splitter | None = None,
        embedder: Embedder | None = None,
        *,
        read_only: bool = False,
        before_write: Callable[[], None] = lambda: None,
        tenant: str = "",
    ) -> None:
        """Opens or creates the index in `directory`; `None`: in memory.

        Ingesting needs a `splitter`. Without an `embedder` BM25 works alone; raises `ConfigError`
        if the index holds vectors of another one. `before_write` is called before documents are
        written. At the embedder the index waits for the turn of its `tenant`.
        """
        self.directory = None if directory is None else Path(directory)
        self.file = open_file(self.directory, read_only, embedder)
        self.texts = IndexTexts(self.file)
        self.contents = IndexContents(self.file)
        writes = IndexWrites(self.file)
        self.writer = Ingestion(self, writes, splitter, embedder, before_write, tenant)
        self._embedder = embedder
        self._tenant = tenant
        self._has_warned = False  # whether the log says that there is no embedder

    def close(self) -> None:
        """Closes the file."""
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

        `retriever` is a name in `RETRIEVERS`; the default is "hybrid" with an embedder and "bm25"
        without. `where` filters by metadata before the ranking. What `check` raises between two
        steps ends the search.
        """
        check_kind("query", query, str)
        check_kind("k", k, int)
        if k < 1:
            raise InputError(f"k is {k}; ask for at least 1 passage.")
        if k > MAX_K:
            raise InputError(f"k is {k}; at most {MAX_K} passages can be asked for.")
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
        rankings: Sequence[Ranking] = resolve_name(RETRIEVERS[retriever])
        wanted = Query(query, condition, self._vector_of(query) if dense in rankings else None)
        check()
        # else a deletion might remove a hit between ranking and reading
        with self.file.reading(check):
            ranked = rank(self.texts, rankings, wanted, k)
            found = self._first_passages([scored.number for scored in ranked], condition)
        return [
            Hit(found[scored.number], scored.score, rank)
            for rank, scored in enumerate(ranked, start=1)
        ]

    def _default_retriever(self) -> str:
        if self._embedder is not None:
            return "hybrid"
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
        vector = self._embedder.embed_query(query, self._tenant)
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
        condition = f"""place IN (SELECT min(place) FROM passages
            WHERE text_number IN (SELECT value FROM json_each(?)) AND {where.sql} GROUP BY text_number)"""
        return dict(read_passages(self.file, condition, [as_json(numbers), *where.parameters]))
