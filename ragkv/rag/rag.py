"""Retrieval-augmented generation: joins the retrieval index and the engine.

Each passage of the index is one chunk of the engine. Ingesting encodes the KV of new passages, and deletes from every
tier the KV of passages that no document holds any more. This module knows no command line and no network protocol.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack

from ragkv.encoding import WarmReport
from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.inference import AnswerOptions
from ragkv.retrieval import Document, Hit, Index, IngestReport, Passage, Removal, Reranker, Splitter, Where
from ragkv.retrieval.embedders import Embedder
from ragkv.runtime import Check, Closing, no_check
from ragkv.sessions import Session
from ragkv.types import Answer, Chunk, TokenEvent

Order = Literal["score", "document"]
DOCUMENT_END = "\n\n"  # `chunk_end` for other models than the bundled reader, which was trained without one
DEFAULT_K = 6  # chunks for a question, as in the evaluation of the CacheBlend paper


def default_chunk_tokens(engine: Engine) -> int:
    """128 for the bundled reader, which was trained on chunks of up to 128 tokens; else 512."""
    return 128 if engine.is_reader else 512


@dataclass(frozen=True, slots=True)
class RagIngestReport:
    """The changes that an ingestion made to the index and to the store."""

    index: IngestReport
    kv: WarmReport
    deleted_entries: int  # entries whose text no document holds any more


@dataclass(frozen=True, slots=True)
class RagAnswer:
    """An answer and the passages of its prompt, in prompt order."""

    answer: Answer
    hits: tuple[Hit, ...]


class Rag(Closing):
    """One corpus and the engine that answers from it. Closing it closes the index and not the engine."""

    def __init__(
        self,
        engine: Engine,
        directory: str | Path | None,
        *,
        chunk_tokens: int = 512,
        embedder: Embedder | None = None,
    ) -> None:
        """Open or create the index at `directory` (`None`: in memory). Without an embedder, only BM25 is used."""
        self.engine = engine
        splitter = Splitter(engine.count_tokens, chunk_tokens, tokenizer_id=engine.tokenizer_id)
        self.index = Index(directory, splitter=splitter, embedder=embedder)

    def ingest(
        self,
        documents: Iterable[Document],
        *,
        prune: bool = False,
        encode: bool = True,
        on_embed: Callable[[int, int], None] | None = None,
        on_encode: Callable[[int, int], None] | None = None,
    ) -> RagIngestReport:
        """Add and update documents in the index and the store. Unchanged documents cost one look-up each.

        `prune` deletes all other documents. Without `encode` the KV is not computed now: the first question that needs
        a chunk misses it and stores it.
        """
        report = self.index.ingest(documents, prune=prune, progress=on_embed)
        deleted = self.engine.delete([self.chunk(passage) for passage in report.forgotten_passages])
        ids = (*report.added, *report.changed, *report.unchanged)
        passages = [passage for document in ids for passage in self.index.passages(document)] if encode else []
        return RagIngestReport(report, self.engine.warm(list(map(self.chunk, passages)), on_encode), deleted)

    def delete(self, document_ids: str | Iterable[str]) -> Removal:
        """Delete documents with their passages, and the KV of each text that no other document holds."""
        removal = self.index.delete(document_ids)
        self.engine.delete([self.chunk(passage) for passage in removal.forgotten_passages])
        return removal

    def retrieve(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        reranker: Reranker | None = None,
        order: Order = "score",
        check: Check = no_check,
    ) -> tuple[Hit, ...]:
        """The best `k` passages: best first, or in the order of the corpus, so that references point backwards.

        What `check` raises between two steps ends the search.
        """
        hits = self.index.search(question, k, retriever=retriever, where=where, reranker=reranker, check=check)
        if order == "document":
            positions = self.index.positions({hit.passage.document_id for hit in hits})
            hits.sort(key=lambda hit: (positions.get(hit.passage.document_id, math.inf), hit.passage.span))
        return tuple(hits)

    def stream(
        self, question: str, hits: Iterable[Hit], session: Session | None = None, **how: Unpack[AnswerOptions]
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the answer, from passages that were retrieved before. `how` is for `Engine.stream`."""
        return self.engine.stream(question, [self.chunk(hit.passage) for hit in hits], session, **how)

    def ask(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        reranker: Reranker | None = None,
        order: Order = "score",
        session: Session | None = None,
        **how: Unpack[AnswerOptions],
    ) -> RagAnswer:
        """Retrieve passages and answer from them. `how` is for `Engine.answer`.

        Raises `InputError` for an empty question.
        """
        if not question.strip():
            raise InputError("The question is empty. Give a question of at least one word.")
        hits = self.retrieve(question, k, retriever=retriever, where=where, reranker=reranker, order=order)
        answer = self.engine.answer(question, [self.chunk(hit.passage) for hit in hits], session, **how)
        return RagAnswer(answer, hits)

    def sweep(self) -> int:
        """Delete the KV of passages that no document holds, and return how many entries were deleted.

        A process that was killed between its changes to the index and to the store leaves such entries.
        """
        return self.engine.retain(self.chunks())

    def chunks(self) -> list[Chunk]:
        """The chunks of all passages."""
        return [self.chunk(passage) for passage in self.index.passages()]

    def chunk(self, passage: Passage) -> Chunk:
        """The engine's chunk of a passage."""
        place = {"source": passage.source, "document": passage.document_id, "span": passage.span}
        return self.engine.chunk(passage.text, {**passage.metadata, **place})

    def close(self) -> None:
        """Close the index. May be called twice."""
        self.index.close()
