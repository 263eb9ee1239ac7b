"""Retrieval and engine joined: documents in, answers with sources out."""

from .corpus import RagIngestReport, splitter_of
from .files import FileOptions, FileOutcome, FileProgress, nothing_read, printable
from .rag import Rag, RagAnswer, question_before
from .sweep import sweep

__all__ = [
    "FileOptions",
    "FileOutcome",
    "FileProgress",
    "Rag",
    "RagAnswer",
    "RagIngestReport",
    "nothing_read",
    "printable",
    "question_before",
    "splitter_of",
    "sweep",
]
