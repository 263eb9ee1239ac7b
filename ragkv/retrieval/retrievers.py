"""Retrievers rank the distinct texts of an index for a query; each is chosen by its name in
`RETRIEVERS` (`registry.py`).

A retriever is one ranking, or several merged by rank. A ranking reads the texts in the state in
which the caller's `IndexFile.reading` holds them, and returns their numbers; it knows no documents.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragkv.errors import MissingExtraError
from ragkv.runtime.words import Word, words

from .embedders import Vectors
from .filters import EVERYTHING, Condition
from .index_file import IN_USE, IndexFile

TextNumbers = npt.NDArray[np.int64]  # numbers of distinct texts in the index

# K in the paper of reciprocal-rank fusion.
RRF_CONSTANT = 60
# How many texts of each ranking are merged, at least.
MERGED_DEPTH = 100
# Of a query `QUERY_TERMS` different terms are looked for.
QUERY_TERMS = 256
# A Korean word with what is appended to it; its pairs of characters find it, too.
_HANGUL = re.compile("[\uac00-\ud7a3]{3,}")


class Query(NamedTuple):
    """What is searched for, and where."""

    text: str
    where: Condition = EVERYTHING
    vector: Vectors | None = None  # (D,), of length 1, for a ranking by vectors


class ScoredText(NamedTuple):
    """A text and its score."""

    number: int  # of the text, in the index
    score: float  # higher is better; comparable within one search only


@dataclass(eq=False, slots=True)
class IndexTexts:
    """The distinct texts of an index as rankings read them, with their vectors in memory."""

    file: IndexFile
    # of a revision
    _vectors: tuple[str, TextNumbers, Vectors] | None = field(default=None, init=False)

    @property
    def held_bytes(self) -> int:
        """What `vectors` keeps in memory."""
        held = self._vectors
        return 0 if held is None else held[1].nbytes + held[2].nbytes

    def numbers(self, where: Condition = EVERYTHING) -> list[int]:
        """The texts that have a passage which meets `where`, ascending."""
        sql = f"SELECT DISTINCT text_number FROM passages WHERE {where.sql} ORDER BY text_number"
        return [row[0] for row in self.file.rows(sql, where.parameters)]

    def vectors(self) -> tuple[TextNumbers, Vectors]:
        """The rows (N,), (N, D) of every text in use that has vectors. Kept in memory until the
        revision changes.
        """
        with self.file.locked():
            revision = self.file.fact("revision") or ""
            if self._vectors is None or self._vectors[0] != revision:
                self._vectors = (revision, *self._read_vectors())
            return self._vectors[1:]

    def _read_vectors(self) -> tuple[TextNumbers, Vectors]:
        dimension = int(self.file.fact("dimension") or 1)
        rows = self.file.rows(
            f"SELECT number, vectors FROM texts WHERE vectors IS NOT NULL AND {IN_USE} "
            "ORDER BY number"
        )
        stored = np.frombuffer(b"".join(row[1] for row in rows), dtype="<f4")
        vectors = stored.astype(np.float32, copy=False).reshape(-1, dimension)
        windows = [len(row[1]) // (4 * dimension) for row in rows]
        return np.repeat(np.array([row[0] for row in rows], dtype=np.int64), windows), vectors

    def forget_vectors(self) -> None:
        """Frees their memory."""
        self._vectors = None


# the best texts first; the number is a limit
Ranking = Callable[[IndexTexts, Query, int], Sequence[ScoredText]]


def bm25(texts: IndexTexts, query: Query, k: int) -> list[ScoredText]:
    """Okapi BM25 by SQLite's full-text table. Needs no model, finds names and numbers.

    A text that shares no term with the query is not found. A filter does not change the weights of
    the terms, which are those of the whole index. Equal scores are by ascending number.
    """
    wanted = list(dict.fromkeys(terms(query.text)))[:QUERY_TERMS]
    if not wanted:
        return []
    # Quoted words are terms, whatever else they mean in SQLite's query language; `rank` is a
    # negative score.
    match = " OR ".join(f'"{term}"' for term in wanted)
    sql = f"""SELECT rowid, -rank FROM terms WHERE terms MATCH ?
        AND EXISTS (SELECT 1 FROM passages WHERE text_number = terms.rowid AND {query.where.sql})
        ORDER BY rank, rowid LIMIT ?"""
    return [ScoredText(*row) for row in texts.file.rows(sql, [match, *query.where.parameters, k])]


def terms(text: str) -> list[str]:
    """The words of a text for BM25; of scripts without spaces, and of Korean, also pairs of
    characters.
    """
    found: list[str] = []
    before: Word | None = None
    for word in words(text):
        found.append(word.text)
        if word.is_cut and before is not None and before.is_cut and before.end == word.start:
            found.append(before.text + word.text)
        elif _HANGUL.fullmatch(word.text):
            found += map("".join, pairwise(word.text))
        before = word
    return found


def dense(texts: IndexTexts, query: Query, k: int) -> list[ScoredText]:
    """The nearest vectors by inner product (cosine, as vectors have length 1), by faiss. Finds
    paraphrases.

    faiss compares with every vector: exact, and about a millisecond for ten thousand. A text longer
    than its embedder's window has several vectors and scores as its best one. Raises
    `MissingExtraError` without faiss.
    """
    assert query.vector is not None
    numbers, vectors = texts.vectors()  # (N,), (N, D)
    if query.where is not EVERYTHING:
        chosen = np.isin(numbers, texts.numbers(query.where))
        numbers = numbers[chosen]
        vectors = vectors[chosen]
    if not len(numbers):
        return []
    # vectors of one text: k * most rows hold k texts
    most = int(np.unique(numbers, return_counts=True)[1].max())
    rows = min(len(numbers), k * most)
    faiss = _faiss()
    scores, places = faiss.knn(query.vector[None], vectors, rows, metric=faiss.METRIC_INNER_PRODUCT)
    found: dict[int, float] = {}
    for score, number in sorted(zip(-scores[0], numbers[places[0]], strict=True)):
        found.setdefault(int(number), -float(score))
    return [ScoredText(number, score) for number, score in found.items()][:k]


def _faiss() -> Any:
    try:
        import faiss  # an extra
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "dense", "Dense retrieval") from error
    return faiss


# What `RETRIEVERS` names.
BM25: tuple[Ranking, ...] = (bm25,)
DENSE: tuple[Ranking, ...] = (dense,)
HYBRID: tuple[Ranking, ...] = (bm25, dense)


def rank(
    texts: IndexTexts, rankings: Sequence[Ranking], query: Query, k: int
) -> Sequence[ScoredText]:
    """The best `k` texts or fewer by one ranking, or by several, merged; equal scores by
    ascending number.
    """
    if len(rankings) == 1:
        return rankings[0](texts, query, k)
    return merge_ranks(ranking(texts, query, max(k, MERGED_DEPTH)) for ranking in rankings)[:k]


def merge_ranks(rankings: Iterable[Sequence[ScoredText]]) -> list[ScoredText]:
    """Several rankings merged by reciprocal rank (Cormack, Clarke and Buettcher, SIGIR 2009), best
    first.

    score(text) = the sum over rankings of 1 / (60 + rank). Only ranks count, as the scores have no
    common scale.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, scored in enumerate(ranking, start=1):
            scores[scored.number] += 1 / (RRF_CONSTANT + rank)
    return [
        ScoredText(number, score)
        for number, score in sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    ]
