"""`RagKVVectorStore`: exact nearest vectors with faiss, with metadata filters, saved on disk without pickle.

Vectors are normalised, so a score is a cosine. With an `llm`, added documents are also encoded as chunks, and deleting
a document deletes its KV in every tier unless another document has the same text. Thread-safe.
"""

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ragkv.errors import InputError, MissingExtraError, StoreError
from ragkv.runtime import make_private_folder, replace_file

from .chat import ChatRagKV
from .filters import Filter, matches

Vectors = npt.NDArray[np.float32]


class RagKVVectorStore(VectorStore):
    """Documents and their vectors, in memory. `save` and `load` keep them in a directory."""

    def __init__(self, embedding: Embeddings, llm: ChatRagKV | None = None) -> None:
        """An empty store. Every document becomes a chunk of `llm`."""
        self._embedding, self._llm = embedding, llm
        self._lock = threading.RLock()
        self._faiss = _faiss()
        self._index: Any = None  # IndexIDMap2 over IndexFlatIP, made when the first vector is added
        self._documents: dict[int, Document] = {}  # by their number in the faiss index
        self._numbers: dict[str, int] = {}  # by document id
        self._next = 0

    # LangChain's interface

    @property
    def embeddings(self) -> Embeddings:
        return self._embedding

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[Any, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **_: Any,
    ) -> list[str]:
        """Add texts and return their ids. A text replaces an earlier one with the same id."""
        texts = list(texts)
        for name, given in (("metadatas", metadatas), ("ids", ids)):
            if given is not None and len(given) != len(texts):
                raise InputError(f"{len(texts)} texts and {len(given)} {name} were given; each text needs one.")
        rows = zip(texts, metadatas or [{}] * len(texts), ids or [""] * len(texts), strict=True)
        return self._add(
            [
                Document(page_content=text, metadata=dict(metadata), id=document_id or str(uuid.uuid4()))
                for text, metadata, document_id in rows
            ]
        )

    def add_documents(self, documents: list[Document], *, ids: list[str] | None = None, **_: Any) -> list[str]:
        """Add documents and return their ids. A document replaces an earlier one with the same id."""
        names = [str(name or "") for name in (ids if ids is not None else [one.id for one in documents])]
        return self.add_texts([one.page_content for one in documents], [one.metadata for one in documents], ids=names)

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool | None:
        """Delete documents by id, or all documents without `ids`. Unknown ids are ignored."""
        with self._lock:
            names = list(self._numbers) if ids is None else list(dict.fromkeys(ids))
            texts = self._remove([name for name in names if name in self._numbers])
        if self._llm is not None and texts:
            self._llm.forget(texts)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        with self._lock:
            return [_copy(self._documents[self._numbers[name]]) for name in ids if name in self._numbers]

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None, **_: Any) -> list[Document]:
        return [one for one, _ in self.similarity_search_with_score(query, k, filter)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **_: Any
    ) -> list[tuple[Document, float]]:
        """The nearest documents that pass `filter`, with their cosines, best first."""
        return self.similarity_search_by_vector_with_score(self._embedding.embed_query(query), k, filter)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **_: Any
    ) -> list[Document]:
        return [one for one, _ in self.similarity_search_by_vector_with_score(embedding, k, filter)]

    def similarity_search_by_vector_with_score(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None
    ) -> list[tuple[Document, float]]:
        """The nearest documents to a vector, with their cosines, best first."""
        with self._lock:
            return [(_copy(self._documents[number]), score) for number, score in self._nearest(embedding, k, filter)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **_: Any,
    ) -> list[Document]:
        return self.max_marginal_relevance_search_by_vector(
            self._embedding.embed_query(query), k, fetch_k, lambda_mult, filter
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **_: Any,
    ) -> list[Document]:
        """`k` of the `fetch_k` nearest: near the query (`lambda_mult` 1) or different from each other (0)."""
        with self._lock:
            near = self._nearest(embedding, fetch_k, filter)
            vectors = [self._index.reconstruct(number) for number, _ in near]
            chosen = _diverse(np.array([score for _, score in near]), np.array(vectors), k, lambda_mult)
            return [_copy(self._documents[near[index][0]]) for index in chosen]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: min(1.0, max(0.0, cosine))

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[Any, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: ChatRagKV | None = None,
        **_: Any,
    ) -> Self:
        store = cls(embedding, llm)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def __len__(self) -> int:
        return len(self._documents)

    # On disk

    def save(self, directory: str | Path) -> Path:
        """Save everything in `directory` and return its path. If interrupted, the old state stays."""
        folder = Path(directory)
        make_private_folder(folder)
        with self._lock:
            rows = [self._index.reconstruct(number) for number in self._documents]
            documents = [
                {"id": one.id, "text": one.page_content, "metadata": one.metadata} for one in self._documents.values()
            ]
        vectors = save({"vectors": np.array(rows or np.empty((0, 0)), np.float32)})
        digest = hashlib.sha256(vectors).hexdigest()
        try:
            text = json.dumps({"version": 1, "vectors": digest, "documents": documents}, ensure_ascii=False)
        except TypeError as error:
            raise InputError(f"The metadata cannot be saved as JSON: {error}. Use JSON values.") from error
        vectors_file = folder / f"vectors-{digest[:16]}.safetensors"
        replace_file(vectors_file, vectors)
        replace_file(folder / "documents.json", text.encode())  # names its vectors file: the new state begins here
        for file in folder.glob("vectors-*.safetensors"):
            if file != vectors_file:
                file.unlink(missing_ok=True)
        return folder

    @classmethod
    def load(cls, directory: str | Path, embedding: Embeddings, llm: ChatRagKV | None = None) -> Self:
        """The store that was saved in `directory`. Raises `StoreError` if it is damaged. Executes no code from it."""
        folder = Path(directory)
        try:
            saved = json.loads((folder / "documents.json").read_text("utf-8"))
            data = (folder / f"vectors-{saved['vectors'][:16]}.safetensors").read_bytes()
            if hashlib.sha256(data).hexdigest() != saved["vectors"]:
                raise ValueError("the checksum of the vectors is not the one in documents.json")
            vectors = load(data)["vectors"]
            documents = [
                Document(page_content=one["text"], metadata=one["metadata"], id=one["id"]) for one in saved["documents"]
            ]
            if len(vectors) != len(documents):
                raise ValueError(f"{len(documents)} documents and {len(vectors)} vectors")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise StoreError(f"The vector store in {folder} cannot be loaded: {error}. Make it anew.") from error
        store = cls(embedding, llm)
        store._put(documents, vectors)
        if llm is not None:
            llm.ingest(documents, encode=False)
        return store

    # Internals

    def _add(self, documents: list[Document]) -> list[str]:
        unique = list({one.id: one for one in documents}.values())  # the last of each id
        vectors = np.array(self._embedding.embed_documents([one.page_content for one in unique]), np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True) if len(unique) else 1.0
        if self._llm is not None:
            self._llm.ingest(unique)
        with self._lock:
            orphaned = self._put(unique, vectors / np.maximum(norms, 1e-9))
        if self._llm is not None and orphaned:
            self._llm.forget(orphaned)
        return [str(one.id) for one in documents]

    def _put(self, documents: Sequence[Document], vectors: Vectors) -> list[str]:
        """Add or replace documents. Returns the replaced texts that no document has any more."""
        if not documents:
            return []
        if self._index is None:
            self._index = self._faiss.IndexIDMap2(self._faiss.IndexFlatIP(vectors.shape[1]))
        if vectors.shape[1] != self._index.d:
            raise InputError(f"Vectors have {vectors.shape[1]} dimensions, but this store has {self._index.d}.")
        orphaned = self._remove([str(one.id) for one in documents if str(one.id) in self._numbers])
        numbers = np.arange(self._next, self._next + len(documents), dtype=np.int64)
        self._next += len(documents)
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), numbers)
        for number, one in zip(numbers.tolist(), documents, strict=True):
            self._documents[number], self._numbers[str(one.id)] = one, number
        held = {one.page_content for one in documents}
        return [text for text in orphaned if text not in held]

    def _remove(self, names: Sequence[str]) -> list[str]:
        """Remove documents. Returns their texts that no other document has."""
        if not names:
            return []
        numbers = [self._numbers.pop(name) for name in names]
        self._index.remove_ids(np.array(numbers, np.int64))
        texts = dict.fromkeys(self._documents.pop(number).page_content for number in numbers)
        held = {one.page_content for one in self._documents.values()} if self._llm is not None else set()
        return [text for text in texts if text not in held]

    def _nearest(self, embedding: Sequence[float], k: int, filter: Filter | None) -> list[tuple[int, float]]:
        """Numbers and cosines, best first. The caller holds the lock."""
        if k < 1:
            raise InputError(f"k is {k}; it must be at least 1.")
        if not self._documents:
            return []
        only = None
        if filter is not None:
            passing = [number for number, one in self._documents.items() if matches(one, filter)]
            if not passing:
                return []
            only = self._faiss.SearchParameters(sel=self._faiss.IDSelectorBatch(np.array(passing, np.int64)))
        query = np.array([embedding], np.float32)
        query /= max(float(np.linalg.norm(query)), 1e-9)
        scores, numbers = self._index.search(query, min(k, len(self._documents)), params=only)
        found = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        return [(number, score) for number, score in found if number >= 0]  # faiss fills missing results with -1


def _diverse(relevance: Any, vectors: Vectors, k: int, lambda_mult: float) -> list[int]:
    """Maximal marginal relevance (Carbonell and Goldstein 1998): indices of up to `k` vectors, best first."""
    chosen: list[int] = []
    left = list(range(len(vectors)))
    while left and len(chosen) < k:
        repeated = vectors[left] @ vectors[chosen].T if chosen else np.zeros((len(left), 1))
        gains = lambda_mult * relevance[left] - (1 - lambda_mult) * repeated.max(axis=1)
        chosen.append(left.pop(int(gains.argmax())))
    return chosen


def _copy(document: Document) -> Document:
    return Document(page_content=document.page_content, metadata=dict(document.metadata), id=document.id)


def _faiss() -> Any:
    try:
        import faiss  # an optional dependency
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "dense", "The vector store") from error
    return faiss
