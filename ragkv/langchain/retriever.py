"""`RagKVRetriever`: the retrieval room's index as a LangChain retriever.

What it returns is made known to the model's catalogue, so that a chain that flattens it into a prompt has its chunks
recognised there. A document's id is its passage's, which stays the same as long as its text does.
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, SkipValidation

from ragkv.dialogue import DialogueDocument
from ragkv.rag import Rag
from ragkv.retrieval import Hit, Index, Reranker, Where

from .chat import ChatRagKV
from .registry import around


class RagKVRetriever(BaseRetriever):
    """The best `k` passages of an index: of `rag`, whose engine then knows them, or of a bare `index`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    index: SkipValidation[Index] | None = Field(default=None, exclude=True)
    rag: SkipValidation[Rag] | None = Field(default=None, exclude=True)
    llm: ChatRagKV | None = Field(
        default=None, exclude=True
    )  # the model that is to know what is found, beside the rag's
    k: int = Field(default=6, ge=1)
    search: str | None = None  # "bm25", "dense" or "fused"; None: the best that the index can do
    where: Where | None = None  # a filter by metadata: see `ragkv.retrieval.filters`
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
        known = [DialogueDocument(one.page_content, one.metadata) for one in documents]
        if self.rag is not None:
            around(self.rag.engine).catalogue.register(known)
        if self.llm is not None:
            self.llm.shared.catalogue.register(known)
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
