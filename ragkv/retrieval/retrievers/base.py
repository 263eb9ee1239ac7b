"""The contract of a retriever: it ranks the distinct texts of one corpus revision for a query.

A retriever is built from a `Corpus` and never changes after that: ingesting makes a new corpus, and searches under way
finish on the old one. So every method is thread-safe without a lock. Retrievers see numbered texts and vectors; they
know neither passages nor documents nor where things are stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]


class Scored(NamedTuple):
    """A text and its score."""

    number: int  # of the text, as the corpus counts
    score: float  # higher is better; comparable within one search only


class Corpus(ABC):
    """What a retriever is built from: the texts of one revision, read when asked for."""

    @abstractmethod
    def texts(self) -> tuple[Numbers, list[str]]:
        """The number and content of every text, by ascending number."""

    @abstractmethod
    def vectors(self) -> tuple[Numbers, Vectors]:
        """The rows (N,), (N, D): every unit vector and the number of its text, which may have several."""

    @abstractmethod
    def embed_query(self, query: str) -> Vectors:
        """The unit vector (D,) of a query. Raises `InputError` where there is no embedder."""

    @abstractmethod
    def retriever(self, name: str) -> "Retriever":
        """A sibling over the same corpus; built once."""

    @abstractmethod
    def load_snapshot(self, name: str, read: Callable[[Path], "Retriever"]) -> "Retriever | None":
        """What `read` makes of the directory saved under `name` for this revision; `None` if absent or damaged."""

    @abstractmethod
    def save_snapshot(self, name: str, write: Callable[[Path], None]) -> None:
        """Keep what `write` puts into a directory, for this revision only. Best effort: never fails a search."""


class Retriever(ABC):
    """Ranks texts for a query."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def build(cls, corpus: Corpus) -> Self:
        """A retriever over `corpus`. Raises `MissingExtraError` where a package is missing."""

    @abstractmethod
    def search(self, query: str, k: int, allowed: Numbers | None = None) -> list[Scored]:
        """At most `k` texts, best first, among `allowed` only (`None`: all); equal scores by ascending number."""


def best(numbers: Numbers, scores: Vectors, k: int) -> list[Scored]:
    """The `k` highest of `scores` (N,), a number at most once with its highest score."""
    order = np.lexsort((numbers, -scores))
    found: dict[int, float] = {}
    for place in order:
        found.setdefault(int(numbers[place]), float(scores[place]))
        if len(found) == k:
            break
    return [Scored(number, score) for number, score in found.items()]
