"""The door of the retrieval room: documents in, passages found.

    index = Index("docs.index", splitter=Splitter(count_tokens), embedder=resolve_embedder())
    report = index.ingest(load_documents("docs/"))
    hits = index.search("who wrote it?", k=5, where={"year": {"gte": 2000}})

Knows no model, no engine and no KV. Works without any extra, by BM25; dense retrieval needs `ragkv[dense]` and an
embedder.
"""

from .document import Document, Hit, Metadata, Passage
from .embedders import Embedder, MiniLM, SentenceTransformerEmbedder, one_vector, resolve_embedder
from .filters import Where
from .index import Index
from .loaders import LOADERS, load_documents
from .reports import IndexStats, IngestReport, Removal
from .rerankers import CrossEncoderReranker, Reranker
from .retrievers import RETRIEVERS, Retriever
from .splitter import Splitter

__all__ = [
    "LOADERS",
    "RETRIEVERS",
    "CrossEncoderReranker",
    "Document",
    "Embedder",
    "Hit",
    "Index",
    "IndexStats",
    "IngestReport",
    "Metadata",
    "MiniLM",
    "Passage",
    "Removal",
    "Reranker",
    "Retriever",
    "SentenceTransformerEmbedder",
    "Splitter",
    "Where",
    "load_documents",
    "one_vector",
    "resolve_embedder",
]
