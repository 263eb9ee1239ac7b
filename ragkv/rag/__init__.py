"""Retrieval and engine joined: documents in, answers with sources out; MapReduce and MapRerank as baselines."""

from .rag import DOCUMENT_END, Ingested, Rag, Sourced, default_chunk_tokens

__all__ = ["DOCUMENT_END", "Ingested", "Rag", "Sourced", "default_chunk_tokens"]
