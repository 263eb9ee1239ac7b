"""A model that sentence-transformers loads. Its packages take seconds to import, and its weights
must be safetensors; nothing is downloaded.

It has the methods of `Bert`, which reads queries without these packages, and also embeds batches.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ragkv.model.loading import without_bars

from .bert import Array

# What a model reads that says nothing of it.
MAX_TOKENS = 512


class SentenceModel:
    """The model in a folder. Not thread-safe: fast tokenizers are not."""

    def __init__(self, folder: Path, device: str) -> None:
        import sentence_transformers  # an extra

        with without_bars():
            self._model = sentence_transformers.SentenceTransformer(
                str(folder),
                device=device,
                local_files_only=True,
                model_kwargs={"use_safetensors": True},  # never unpickled
            )
        self.dimension = int(self._model.get_embedding_dimension() or 0)
        self.max_tokens = int(self._model.max_seq_length or MAX_TOKENS)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The (start, end) of each token of a text, without special tokens."""
        encoded = self._model.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return list(encoded["offset_mapping"])

    @property
    def special_tokens(self) -> int:
        """How many tokens stand around every text."""
        return int(self._model.tokenizer.num_special_tokens_to_add())

    def encode(self, text: str) -> Array:
        """The unit vector (D,) of a query; tokens after `max_tokens` are not read."""
        vector: Array = self._rows(self._model.encode_query, [text])[0]
        return vector

    def encode_documents(self, texts: Sequence[str]) -> Array:
        """The unit vectors (N, D) of texts, in one batch."""
        return self._rows(self._model.encode_document, list(texts))

    @staticmethod
    def _rows(encode: Callable[..., object], texts: list[str]) -> Array:
        rows = encode(
            texts, batch_size=len(texts), normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(rows, dtype=np.float32)
