"""Retrievers rank the distinct texts of one corpus revision for a query; each is chosen by its name in `RETRIEVERS`.

A retriever is built from a `Corpus` and never changes after that: an ingestion makes a new corpus, and searches that
are running finish on the old one. So every method is thread-safe without a lock. Retrievers see numbered texts and
vectors. They know neither passages nor documents nor where things are stored.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.runtime import Check, no_check
from ragkv.runtime.words import Word, words

from .corpus import Corpus
from .values import TextNumbers, Vectors

# `RRF_CONSTANT` is k in the paper of reciprocal-rank fusion.
RRF_CONSTANT = 60
# `FUSED_DEPTH` is how many texts of each ranking are fused, at least.
FUSED_DEPTH = 100

# `_HANGUL` is a Korean word with what is appended to it; its pairs of characters find it, too.
_HANGUL = re.compile("[\uac00-\ud7a3]{3,}")


class ScoredText(NamedTuple):
    """A text and its score."""

    number: int  # of the text, in the corpus
    score: float  # higher is better; comparable within one search only


class Retriever(ABC):
    """Ranks texts for a query."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def build(cls, corpus: Corpus, check: Check = no_check) -> Self:
        """A retriever over `corpus`. Raises `MissingExtraError` if a package is missing, and what `check` raises."""

    @abstractmethod
    def search(self, query: str, k: int, allowed: TextNumbers | None = None) -> list[ScoredText]:
        """The best `k` texts or fewer, best first, among `allowed` (`None`: all); equal scores by ascending number."""


class Bm25(Retriever):
    """Okapi BM25 by bm25s (the Lucene variant). Needs no model, finds names and numbers.

    bm25s cannot add to an index. So it is rebuilt, in time linear in the corpus, at the first search after a change,
    and saved as a snapshot for the next process. A text that shares no term with the query is not found. A filter does
    not change the term weights, which are those of the whole corpus.
    """

    name = "bm25"

    def __init__(self, numbers: TextNumbers, scorer: Any) -> None:
        self._numbers = numbers  # (N,)
        self._scorer = scorer  # bm25s.BM25, or None for a corpus without a term

    @classmethod
    def build(cls, corpus: Corpus, check: Check = no_check) -> Self:
        if (loaded := corpus.load_snapshot(cls.name, cls._read)) is not None:
            return loaded
        numbers, texts = corpus.texts()
        tokenized = []
        for text in texts:
            check()
            tokenized.append(terms(text))
        if not any(tokenized):
            return cls(numbers, None)
        scorer = _bm25s().BM25(method="lucene", backend="numpy")
        scorer.index(tokenized, show_progress=False)
        built = cls(numbers, scorer)
        corpus.save_snapshot(cls.name, built._write)
        return built

    def search(self, query: str, k: int, allowed: TextNumbers | None = None) -> list[ScoredText]:
        vocabulary = {} if self._scorer is None else self._scorer.vocab_dict
        ids = [vocabulary[term] for term in terms(query) if term in vocabulary]
        if not ids:
            return []
        scores = self._scorer.get_scores_from_ids(ids)  # (N,)
        found = scores > 0
        if allowed is not None:
            found &= np.isin(self._numbers, allowed)
        places = np.flatnonzero(found)
        if len(places) > k:  # keep all ties with the k-th, so that `_best` can order them
            border = np.partition(scores[places], len(places) - k)[len(places) - k]
            places = places[scores[places] >= border]
        return _best(self._numbers[places], scores[places], k)

    def _write(self, directory: Path) -> None:
        self._scorer.save(directory, show_progress=False)
        np.save(directory / "numbers.npy", self._numbers, allow_pickle=False)

    @classmethod
    def _read(cls, directory: Path) -> Self:
        numbers = np.load(directory / "numbers.npy", allow_pickle=False)
        scorer = _bm25s().BM25.load(directory, mmap=True, show_progress=False)
        saved = json.loads((directory / "params.index.json").read_text())["num_docs"]
        if saved != len(numbers):
            raise ValueError(f"{saved} scored texts, {len(numbers)} numbers")
        return cls(numbers, scorer)


class Dense(Retriever):
    """The nearest vectors by inner product (cosine, as vectors have length 1), by faiss. Finds paraphrases.

    `IndexFlatIP` compares with every vector: it is exact and takes about a millisecond per ten thousand vectors. A
    text longer than its embedder's window has several vectors and scores as its best one.
    """

    name = "dense"

    def __init__(self, embed_query: Callable[[str], Vectors], index: Any, vectors_per_text: int) -> None:
        self._embed_query = embed_query
        self._index = index  # faiss.IndexIDMap2 over IndexFlatIP
        self._vectors_per_text = vectors_per_text  # of the text that has most

    @classmethod
    def build(cls, corpus: Corpus, check: Check = no_check) -> Self:
        check()
        faiss = _faiss()
        numbers, vectors = corpus.vectors()
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
        index.add_with_ids(vectors, numbers)
        most = int(np.unique(numbers, return_counts=True)[1].max()) if len(numbers) else 1
        return cls(corpus.embed_query, index, most)

    def search(self, query: str, k: int, allowed: TextNumbers | None = None) -> list[ScoredText]:
        if self._index.ntotal == 0 or (allowed is not None and len(allowed) == 0):
            return []
        faiss = _faiss()
        # The best k * vectors_per_text rows hold k distinct texts, or all there are.
        rows = min(self._index.ntotal, k * self._vectors_per_text)
        only = None if allowed is None else faiss.SearchParameters(sel=faiss.IDSelectorBatch(allowed))
        scores, numbers = self._index.search(self._embed_query(query)[None, :], rows, params=only)
        found = numbers[0] >= 0  # faiss pads missing results with -1
        return _best(numbers[0][found], scores[0][found], k)


class RankFusion(Retriever):
    """Hybrid retrieval: reciprocal-rank fusion of BM25 and dense (Cormack, Clarke and Buettcher, SIGIR 2009)."""

    name = "fused"

    def __init__(self, retrievers: Sequence[Retriever]) -> None:
        self._retrievers = retrievers

    @classmethod
    def build(cls, corpus: Corpus, check: Check = no_check) -> Self:
        return cls([corpus.build_once(Bm25.build, check), corpus.build_once(Dense.build, check)])

    def search(self, query: str, k: int, allowed: TextNumbers | None = None) -> list[ScoredText]:
        depth = max(k, FUSED_DEPTH)
        return fuse([retriever.search(query, depth, allowed) for retriever in self._retrievers])[:k]


RETRIEVERS: dict[str, type[Retriever]] = {retriever.name: retriever for retriever in (Bm25, Dense, RankFusion)}


def retriever_type(name: str) -> type[Retriever]:
    """The class of a registered retriever. Raises `ConfigError` with the known names."""
    if name not in RETRIEVERS:
        raise ConfigError(f"Unknown retriever {name!r}. Known: {', '.join(sorted(RETRIEVERS))}.")
    return RETRIEVERS[name]


def fuse(rankings: Iterable[Sequence[ScoredText]]) -> list[ScoredText]:
    """The reciprocal-rank fusion of rankings, best first; equal scores by ascending number.

    score(text) = the sum over rankings of 1 / (60 + rank). Only ranks count, as the scores have no common scale.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, scored in enumerate(ranking, start=1):
            scores[scored.number] += 1 / (RRF_CONSTANT + rank)
    return [ScoredText(number, score) for number, score in sorted(scores.items(), key=lambda item: (-item[1], item[0]))]


def terms(text: str) -> list[str]:
    """The terms of a text for BM25: its words; of scripts without spaces, and of Korean, also pairs of characters."""
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


def _best(numbers: TextNumbers, scores: Vectors, k: int) -> list[ScoredText]:
    """The `k` highest of `scores` (N,), each number once with its highest score."""
    order = np.lexsort((numbers, -scores))
    found: dict[int, float] = {}
    for place in order:
        found.setdefault(int(numbers[place]), float(scores[place]))
        if len(found) == k:
            break
    return [ScoredText(number, score) for number, score in found.items()]


def _bm25s() -> Any:
    import bm25s  # takes a third of a second

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s


def _faiss() -> Any:
    try:
        import faiss  # an extra
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "dense", "Dense retrieval") from error
    return faiss
