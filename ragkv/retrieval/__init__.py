"""Retrieval: documents go in, the passages that match a query come out.

    index = Index("docs.index", splitter=Splitter(count_tokens), embedder=resolve_embedder())
    report = index.writer.ingest(Document(name, text) for name, text in texts.items())
    hits = index.search("who wrote it?", k=5, where={"year": {"gte": 2000}})

`ragkv.rag` reads files and folders into it. This package knows no engine, no prompt and no KV.
Without any extra it retrieves by BM25. Dense retrieval needs `ragkv[dense]` and an embedder.
"""

from .documents.loaders import load_bytes
from .documents.reading import ParseLimits
from .embedders import Embedder, SentenceTransformerEmbedder, one_vector, resolve_embedder
from .filters import Where
from .index import Index
from .index_folder import index_bytes, index_state, look_into
from .ingested import (
    Document,
    DocumentSummary,
    FileRecord,
    IndexStats,
    IngestReport,
)
from .passages import Hit, Metadata, Passage
from .splitter import Splitter

__all__ = [
    "Document",
    "DocumentSummary",
    "Embedder",
    "FileRecord",
    "Hit",
    "Index",
    "IndexStats",
    "IngestReport",
    "Metadata",
    "ParseLimits",
    "Passage",
    "SentenceTransformerEmbedder",
    "Splitter",
    "Where",
    "index_bytes",
    "index_state",
    "load_bytes",
    "look_into",
    "one_vector",
    "resolve_embedder",
]
