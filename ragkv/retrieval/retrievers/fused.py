"""Reciprocal-rank fusion of BM25 and dense retrieval (Cormack, Clarke and Buettcher, SIGIR 2009).

score(text) = sum over both of 1 / (60 + rank): ranks only, as the two scores have no common scale.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Self

from .base import Corpus, Numbers, Retriever, Scored

RANK_CONSTANT = 60  # the paper's k
DEPTH = 100  # how far down each ranking counts, at least


class Fused(Retriever):
    """What either finds, first what both find."""

    name = "fused"

    def __init__(self, siblings: Sequence[Retriever]) -> None:
        self._siblings = siblings

    @classmethod
    def build(cls, corpus: Corpus) -> Self:
        return cls([corpus.retriever("bm25"), corpus.retriever("dense")])

    def search(self, query: str, k: int, allowed: Numbers | None = None) -> list[Scored]:
        depth = max(k, DEPTH)
        return fuse([sibling.search(query, depth, allowed) for sibling in self._siblings])[:k]


def fuse(rankings: Iterable[Sequence[Scored]], rank_constant: int = RANK_CONSTANT) -> list[Scored]:
    """The reciprocal-rank fusion of rankings, best first; equal scores by ascending number."""
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, scored in enumerate(ranking, start=1):
            scores[scored.number] += 1 / (rank_constant + rank)
    return [Scored(number, score) for number, score in sorted(scores.items(), key=lambda item: (-item[1], item[0]))]
