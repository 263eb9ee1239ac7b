"""`RagKVRetriever`: an index of `ragkv.retrieval` as a LangChain retriever.

The returned documents are registered as chunks of the model, so that they are recognised when a chain puts them into a
prompt. A document has the id of its passage, which stays the same as long as the text does.
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, SkipValidation

from ragkv.api.chat import DialogueDocument
from ragkv.retrieval import Hit, Index, Reranker, Where
from ragkv.retrieval.rag import Rag

from .chat import ChatRagKV
from .engines import shared_engine_of


class RagKVRetriever(BaseRetriever):
    """The best `k` passages of `rag`, whose engine then knows them, or of a bare `index`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: SkipValidation[Index] | None = Field(default=None, exclude=True)
    rag: SkipValidation[Rag] | None = Field(default=None, exclude=True)
    llm: ChatRagKV | None = Field(default=None, exclude=True)  # another model that shall know the documents
    k: int = Field(default=6, ge=1)
    search: str | None = None  # "bm25", "dense" or "fused"; None: the best one that the index has
    where: Where | None = None  # a metadata filter, see `ragkv.retrieval.filters`
    reranker: SkipValidation[Reranker] | None = Field(default=None, exclude=True)

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
            reranker=self.reranker,
        )
        documents = [_document(hit) for hit in hits]
        found = [DialogueDocument(document.page_content, document.metadata) for document in documents]
        if self.rag is not None:
            shared_engine_of(self.rag.engine).catalogue.register(found)
        if self.llm is not None:
            self.llm.shared.catalogue.register(found)
        return documents

    def _index(self) -> Index:
        if (index := self.index or (self.rag.index if self.rag else None)) is None:
            raise ValueError("A retriever needs an index: RagKVRetriever(rag=...) or RagKVRetriever(index=...).")
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
