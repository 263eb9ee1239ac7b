"""Retrieval and engine joined: documents in, answers with sources out. MapReduce and MapRerank are its baselines."""

from ragkv.config import DOCUMENT_END

from .files import FileOptions, FileOutcome, FileProgress, nothing_read, printable
from .gate_prompts import gate_prompts, read_questions
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
    "gate_prompts",
    "nothing_read",
    "printable",
    "read_questions",
]
