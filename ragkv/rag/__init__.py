"""Joins retrieval and engine: documents in, answers with sources out."""

from .corpus import Corpus, RagIngestReport, splitter_of
from .files import FileOptions, FileOutcome, FileProgress, nothing_read, printable
from .rag import Rag, RagAnswer, RagOptions
from .sweep import sweep

__all__ = [
    "Corpus",
    "FileOptions",
    "FileOutcome",
    "FileProgress",
    "Rag",
    "RagAnswer",
    "RagIngestReport",
    "RagOptions",
    "nothing_read",
    "printable",
    "splitter_of",
    "sweep",
]
