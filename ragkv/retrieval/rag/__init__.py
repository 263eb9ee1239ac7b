"""Retrieval and engine joined: documents in, answers with sources out."""

from ragkv.config import DOCUMENT_END

from .files import FileOptions, FileOutcome, FileProgress, nothing_read, printable
from .rag import Rag, RagAnswer, RagIngestReport, default_chunk_tokens

__all__ = [
    "DOCUMENT_END",
    "FileOptions",
    "FileOutcome",
    "FileProgress",
    "Rag",
    "RagAnswer",
    "RagIngestReport",
    "default_chunk_tokens",
    "nothing_read",
    "printable",
]
