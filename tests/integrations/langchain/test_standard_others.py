"""LangChain's own suites for embeddings, vector stores, retrievers and byte stores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import (
    BaseStoreAsyncTests,
    BaseStoreSyncTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from ragkv.integrations.langchain import RagKVByteStore, RagKVEmbeddings, RagKVRetriever, RagKVVectorStore
from ragkv.retrieval import Document, Index
from ragkv.retrieval.testing import HashEmbedder, word_splitter


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


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return RagKVVectorStore(self.get_embeddings())


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RagKVRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        index = Index(None, splitter=word_splitter(20), embedder=HashEmbedder())
        index.ingest(Document(str(n), f"The mill of Marl makes paper of kind {n}.") for n in range(5))
        return {"index": index, "k": 4}

    @property
    def retriever_query_example(self) -> str:
        return "Which paper does the mill make?"


class _ByteStore:
    @pytest.fixture
    def kv_store(self, tmp_path: Path) -> Iterator[BaseStore[str, bytes]]:
        store = RagKVByteStore(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def three_values(self) -> tuple[bytes, bytes, bytes]:
        return b"foo", b"", b"\x00\xff" * 5_000


class TestByteStore(_ByteStore, BaseStoreSyncTests[bytes]):
    pass


class TestByteStoreAsync(_ByteStore, BaseStoreAsyncTests[bytes]):
    pass
