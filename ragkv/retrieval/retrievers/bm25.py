"""Okapi BM25 by bm25s (the Lucene variant): needs no model, finds names and numbers.

bm25s cannot add to an index, so it is built anew, linear in the corpus, at the first search after a change, and kept as
a snapshot for the next process. A text that shares no term with the query is no hit.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any, Self

import numpy as np

from .base import Corpus, Numbers, Retriever, Scored, best

# Scripts written without spaces: their runs are cut into single characters and pairs, or no query would ever match.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TERMS = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_UNSPACED_START = re.compile(rf"[{_UNSPACED}]")


def terms(text: str) -> list[str]:
    """The terms of a text: lowercased words, and in unspaced scripts characters and pairs of them."""
    found: list[str] = []
    for run in _TERMS.findall(text.lower()):
        if _UNSPACED_START.match(run):
            found += run
            found += (run[i : i + 2] for i in range(len(run) - 1))
        else:
            found.append(run)
    return found


class Bm25(Retriever):
    """Term statistics over the whole corpus; a filter does not change the weights, only who may appear."""

    name = "bm25"

    def __init__(self, numbers: Numbers, scorer: Any) -> None:
        self._numbers = numbers  # (N,)
        self._scorer = scorer  # bm25s.BM25, or None for a corpus without a term

    @classmethod
    def build(cls, corpus: Corpus) -> Self:
        loaded = corpus.load_snapshot(cls.name, cls._read)
        if isinstance(loaded, cls):
            return loaded
        bm25s = _bm25s()

        numbers, texts = corpus.texts()
        tokenized = [terms(text) for text in texts]
        if not any(tokenized):
            return cls(numbers, None)
        scorer = bm25s.BM25(method="lucene", backend="numpy")
        scorer.index(tokenized, show_progress=False)
        built = cls(numbers, scorer)
        corpus.save_snapshot(cls.name, built._write)
        return built

    def search(self, query: str, k: int, allowed: Numbers | None = None) -> list[Scored]:
        vocabulary = {} if self._scorer is None else self._scorer.vocab_dict
        ids = [vocabulary[term] for term in terms(query) if term in vocabulary]
        if not ids:
            return []
        scores = self._scorer.get_scores_from_ids(ids)  # (N,)
        keep = scores > 0
        if allowed is not None:
            keep &= np.isin(self._numbers, allowed)
        places = np.flatnonzero(keep)
        if len(places) > k:  # ties at the border all stay in, so that `best` can order them
            border = np.partition(scores[places], len(places) - k)[len(places) - k]
            places = places[scores[places] >= border]
        return best(self._numbers[places], scores[places], k)

    def _write(self, directory: Path) -> None:
        self._scorer.save(directory, show_progress=False)
        np.save(directory / "numbers.npy", self._numbers, allow_pickle=False)

    @classmethod
    def _read(cls, directory: Path) -> Self:
        bm25s = _bm25s()

        numbers = np.load(directory / "numbers.npy", allow_pickle=False)
        scorer = bm25s.BM25.load(directory, mmap=True, show_progress=False)
        saved = json.loads((directory / "params.index.json").read_text())["num_docs"]
        if saved != len(numbers):
            raise ValueError(f"{saved} scored texts, {len(numbers)} numbers")
        return cls(numbers, scorer)


def _bm25s() -> Any:
    import bm25s  # a third of a second

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s
