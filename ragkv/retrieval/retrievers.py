"""Retrievers rank the distinct texts of an index for a query; each is chosen by its name in
`RETRIEVERS`.

A retriever is one ranking, or several fused by rank. A ranking reads the database in the state in
which the caller's `reading()` holds it, and returns the numbers of texts; it knows neither passages
nor documents.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ragkv.errors import MissingExtraError
from ragkv.runtime.words import Word, words

from .filters import EVERYTHING, Condition
from .index_file import IndexReads
from .ingested import Vectors

# K in the paper of reciprocal-rank fusion.
RRF_CONSTANT = 60
# How many texts of each ranking are fused, at least.
FUSED_DEPTH = 100
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

    number: int  # of the text, in the database
    score: float  # higher is better; comparable within one search only


# the best texts first; the number is a limit
Ranking = Callable[[IndexReads, Query, int], Sequence[ScoredText]]


def bm25(file: IndexReads, query: Query, k: int) -> list[ScoredText]:
    """Okapi BM25 by SQLite's full-text table. Needs no model, finds names and numbers.

    A text that shares no term with the query is not found. A filter does not change the weights of
    the terms, which are those of the whole index.
    """
    wanted = list(dict.fromkeys(terms(query.text)))[:QUERY_TERMS]
    return [ScoredText(*row) for row in file.rank_by_terms(wanted, k, query.where)]


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


def dense(file: IndexReads, query: Query, k: int) -> list[ScoredText]:
    """The nearest vectors by inner product (cosine, as vectors have length 1), by faiss. Finds
    paraphrases.

    faiss compares with every vector: exact, and about a millisecond for ten thousand. A text longer
    than its embedder's window has several vectors and scores as its best one. Raises
    `MissingExtraError` without faiss.
    """
    assert query.vector is not None
    numbers, vectors = file.vectors()  # (N,), (N, D)
    if query.where is not EVERYTHING:
        chosen = np.isin(numbers, file.text_numbers(query.where))
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


RETRIEVERS: dict[str, tuple[Ranking, ...]] = {
    "bm25": (bm25,),
    "dense": (dense,),
    "fused": (bm25, dense),
}


def rank(
    file: IndexReads, rankings: Sequence[Ranking], query: Query, k: int
) -> Sequence[ScoredText]:
    """The best `k` texts or fewer by one ranking, or by the fusion of several; equal scores by
    ascending number.
    """
    if len(rankings) == 1:
        return rankings[0](file, query, k)
    return fuse(ranking(file, query, max(k, FUSED_DEPTH)) for ranking in rankings)[:k]


def fuse(rankings: Iterable[Sequence[ScoredText]]) -> list[ScoredText]:
    """The reciprocal-rank fusion of rankings (Cormack, Clarke and Buettcher, SIGIR 2009), best
    first.

    score(text) = the sum over rankings of 1 / (60 + rank). Only ranks count, as the scores have no
    common scale.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for place, scored in enumerate(ranking, start=1):
            scores[scored.number] += 1 / (RRF_CONSTANT + place)
    return [
        ScoredText(number, score)
        for number, score in sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    ]
