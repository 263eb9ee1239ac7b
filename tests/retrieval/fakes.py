"""An embedder and a splitter without weights."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from ragkv.retrieval import Embedder, Splitter
from ragkv.retrieval.embedders import Vectors
from ragkv.runtime import Check, no_check


class HashEmbedder(Embedder):
    """A bag of hashed words: texts that share words are close. Records every text that it
    embeds.
    """

    name = "hash"

    def __init__(self, dimension: int = 64, window_words: int | None = None) -> None:
        self.id = f"hash:{dimension}:{window_words}"
        self.embedded: list[str] = []  # texts in order, without queries
        self._dimension = dimension
        self._window_words = window_words

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed_texts(
        self, texts: Sequence[str], check: Check = no_check, tenant: str = ""
    ) -> list[Vectors]:
        found = []
        for text in texts:
            check()
            self.embedded.append(text)
            found.append(np.stack([self.embed_query(window) for window in self._windows(text)]))
        return found

    def embed_query(self, query: str, tenant: str = "") -> Vectors:
        vector = np.zeros(self._dimension, dtype=np.float32)  # (D,)
        for word in re.findall(r"\w+", query.lower()):
            vector[_number(word) % self._dimension] += 1
        return vector / max(float(np.linalg.norm(vector)), 1e-9)

    def _windows(self, text: str) -> list[str]:
        words = text.split()
        size = self._window_words or max(1, len(words))
        return [" ".join(words[i : i + size]) for i in range(0, len(words), size)] or [""]


def word_splitter(tokens: int = 512) -> Splitter:
    """A splitter that counts words."""
    return Splitter(lambda text: len(text.split()), tokens, tokenizer_id="words")


def _number(word: str) -> int:
    data = word.encode()
    return int(
        hashlib.blake2b(len(data).to_bytes(8, "little") + data, digest_size=16).hexdigest(), 16
    )
