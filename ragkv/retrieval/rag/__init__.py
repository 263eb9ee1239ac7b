"""Retrieval and engine joined: documents in, answers with sources out."""

from .files import FileOptions, FileOutcome, FileProgress, nothing_read, printable
from .rag import Rag, RagAnswer, RagIngestReport

__all__ = [
    "FileOptions",
    "FileOutcome",
    "FileProgress",
    "Rag",
    "RagAnswer",
    "RagIngestReport",
    "nothing_read",
    "printable",
]
