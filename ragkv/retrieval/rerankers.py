"""Rerankers score the best hits of a search again with a slower, better model. Used only if the caller passes one."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv.errors import ModelNotFoundError

from .embedders import load_local
from .values import Hit


class Reranker(ABC):
    """Scores pairs of a query and a text. Thread-safe."""

    @abstractmethod
    def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """A score for each text; higher is better."""

    def rerank(self, query: str, hits: Sequence[Hit], k: int) -> list[Hit]:
        """The best `k` of `hits` by `score`, with new ranks. Hits of equal score keep their order."""
        if not hits:
            return []
        scores = self.score(query, [hit.passage.text for hit in hits])
        order = sorted(range(len(hits)), key=lambda place: -scores[place])[:k]
        return [replace(hits[place], score=scores[place], rank=rank) for rank, place in enumerate(order, start=1)]


class CrossEncoderReranker(Reranker):
    """A sentence-transformers CrossEncoder in a local directory. Weights must be safetensors; nothing is downloaded."""

    def __init__(self, path: str | Path, *, device: str = "cpu", batch_size: int = 16) -> None:
        self._path = Path(path)
        self._device = device
        self._batch_size = batch_size
        self._lock = threading.Lock()  # fast tokenizers are not thread-safe
        self._model: Any = None
        if not (self._path / "config.json").exists():
            raise ModelNotFoundError(f"No cross-encoder at {path}: it has no config.json. Name a model's directory.")

    def score(self, query: str, texts: Sequence[str]) -> list[float]:
        with self._lock:
            if self._model is None:
                self._model = load_local("CrossEncoder", self._path, self._device)
            pairs = [(query, text) for text in texts]
            scores = self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        return [float(score) for score in scores]
