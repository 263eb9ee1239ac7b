"""Nearest vectors by inner product (cosine, as vectors have length 1), exact, by faiss.

`IndexFlatIP` compares with every vector: exact, deletable, about a millisecond per ten thousand vectors. A text longer
than its embedder's window has several; it scores as its best one.
"""

from typing import Any, Self

import numpy as np

from ragkv.errors import MissingExtraError

from .base import Corpus, Numbers, Retriever, Scored, best


class Dense(Retriever):
    """Finds what means the same in other words."""

    name = "dense"

    def __init__(self, corpus: Corpus, index: Any, vectors_per_text: int) -> None:
        self._corpus = corpus
        self._index = index  # faiss.IndexIDMap2 over IndexFlatIP
        self._vectors_per_text = vectors_per_text  # of the text that has most

    @classmethod
    def build(cls, corpus: Corpus) -> Self:
        faiss = _faiss()
        numbers, vectors = corpus.vectors()
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        index.add_with_ids(vectors, numbers)
        most = int(np.unique(numbers, return_counts=True)[1].max()) if len(numbers) else 1
        return cls(corpus, index, most)

    def search(self, query: str, k: int, allowed: Numbers | None = None) -> list[Scored]:
        if self._index.ntotal == 0 or (allowed is not None and len(allowed) == 0):
            return []
        faiss = _faiss()
        # The best k * most rows hold k distinct texts, or all there are.
        rows = min(self._index.ntotal, k * self._vectors_per_text)
        only = None if allowed is None else faiss.SearchParameters(sel=faiss.IDSelectorBatch(allowed))
        scores, numbers = self._index.search(self._corpus.embed_query(query)[None, :], rows, params=only)
        found = numbers[0] >= 0  # faiss fills up with -1
        return best(numbers[0][found], scores[0][found], k)


def _faiss() -> Any:
    try:
        import faiss  # an extra
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "dense", "Dense retrieval") from error
    return faiss
