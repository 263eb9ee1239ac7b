"""LangChain's own suites for embeddings and retrievers."""

from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import EmbeddingsIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from ragkv.integrations.langchain import RagKVEmbeddings, RagKVRetriever
from ragkv.retrieval import Document, Index
from tests.retrieval.fakes import HashEmbedder, word_splitter


class _Embeddings:
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return RagKVEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"embedder": HashEmbedder()}


class TestEmbeddingsUnit(_Embeddings, EmbeddingsUnitTests):
    pass


class TestEmbeddings(_Embeddings, EmbeddingsIntegrationTests):
    pass


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RagKVRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        index = Index(None, splitter=word_splitter(20), embedder=HashEmbedder())
        index.writer.ingest(
            Document(str(n), f"The mill of Marl makes paper of kind {n}.") for n in range(5)
        )
        return {"index": index, "k": 4}

    @property
    def retriever_query_example(self) -> str:
        return "Which paper does the mill make?"
