"""Reranking: a second, slower look at the best hits. Off unless a caller passes one."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv.errors import MissingExtraError, ModelNotFoundError

from .document import Hit
from .embedders import quiet_loading


class Reranker(ABC):
    """Scores pairs of a query and a text. Thread-safe."""

    @abstractmethod
    def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """A score for each text, higher is better."""

    def rerank(self, query: str, hits: Sequence[Hit], k: int) -> list[Hit]:
        """The best `k` of `hits` by `score`, ranked anew; equal scores keep their order."""
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
        self._loaded: Any = None
        if not (self._path / "config.json").exists():
            raise ModelNotFoundError(f"No cross-encoder at {path}: it has no config.json. Name a model's directory.")

    def score(self, query: str, texts: Sequence[str]) -> list[float]:
        with self._lock:
            pairs = [(query, text) for text in texts]
            scores = self._model().predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        return [float(score) for score in scores]

    def _model(self) -> Any:
        if self._loaded is None:
            try:
                from sentence_transformers import CrossEncoder  # an extra, and seconds
            except ImportError as error:
                raise MissingExtraError("sentence-transformers", "dense", "Reranking") from error
            with quiet_loading():
                self._loaded = CrossEncoder(
                    str(self._path),
                    device=self._device,
                    local_files_only=True,
                    model_kwargs={"use_safetensors": True},  # never unpickle weights
                )
        return self._loaded
