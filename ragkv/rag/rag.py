"""RAG: documents in, answers with sources out. Retrieval and the engine, joined.

A passage of the index is one chunk of the engine: ingesting encodes the KV of new passages, and what no document holds
any more is deleted from every tier. It knows no command line and no transport.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragkv.engine import Engine, WarmReport
from ragkv.retrieval import Document, Hit, Index, IngestReport, Passage, Removal, Reranker, Splitter, Where
from ragkv.retrieval.embedders import Embedder
from ragkv.runtime import Closing
from ragkv.sessions import Session
from ragkv.types import Answer, Chunk, TokenEvent

Order = Literal["score", "document"]
DOCUMENT_END = "\n\n"  # `chunk_end` for models other than the reader, which was taught to do without
DEFAULT_K = 6  # chunks a question, as in the CacheBlend paper's evaluation


def default_chunk_tokens(engine: Engine) -> int:
    """The bundled reader was trained on chunks of up to 128 tokens; others get the usual 512."""
    return 128 if engine.is_reader else 512


@dataclass(frozen=True, slots=True)
class Ingested:
    """What an ingestion did to the index and to the store."""

    index: IngestReport
    kv: WarmReport
    deleted_entries: int  # entries dropped because no document holds their text any more


@dataclass(frozen=True, slots=True)
class Sourced:
    """An answer and the passages it was given, in prompt order."""

    answer: Answer
    hits: tuple[Hit, ...]


class Rag(Closing):
    """One corpus behind one engine. Owns its index, not the engine."""

    def __init__(
        self,
        engine: Engine,
        directory: str | Path | None,
        *,
        chunk_tokens: int = 512,
        embedder: Embedder | None = None,
    ) -> None:
        """Opens or creates the index at `directory` (`None`: in memory). Without an embedder BM25 works alone."""
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
    ) -> Ingested:
        """Bring index and store to these documents; what is unchanged costs a look-up. `prune` deletes all others.

        Without `encode` KV is not computed now: a chunk's first question misses and leaves its entry behind.
        """
        report = self.index.ingest(documents, prune=prune, progress=on_embed)
        deleted = self.engine.delete([self.chunk(passage) for passage in report.forgotten_passages])
        ids = (*report.added, *report.changed, *report.unchanged)
        wanted = [self.chunk(passage) for document in ids for passage in self.index.passages(document)]
        return Ingested(report, self.engine.warm(wanted if encode else [], on_encode), deleted)

    def delete(self, document_ids: str | Iterable[str]) -> Removal:
        """Delete documents: their passages, and the KV of every text that no other document holds."""
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
    ) -> tuple[Hit, ...]:
        """The best `k` passages: best first, or as they stand in the corpus, so that references point backwards."""
        hits = self.index.search(question, k, retriever=retriever, where=where, reranker=reranker)
        if order == "document":
            place = {name: at for at, name in enumerate(self.index.document_ids())}
            hits.sort(key=lambda hit: (place.get(hit.passage.document_id, len(place)), hit.passage.span))
        return tuple(hits)

    def stream(
        self, question: str, hits: Iterable[Hit], session: Session | None = None, **how: Any
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the answer, over passages already retrieved. `how` is what `Engine.stream` takes."""
        chunks = [self.chunk(hit.passage) for hit in hits]
        return self.engine.stream(question, chunks, session, **how)

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
        **how: Any,
    ) -> Sourced:
        """Retrieve, answer, and say from what."""
        hits = self.retrieve(question, k, retriever=retriever, where=where, reranker=reranker, order=order)
        answer = self.engine.answer(question, [self.chunk(hit.passage) for hit in hits], session, **how)
        return Sourced(answer, hits)

    def sweep(self) -> int:
        """Drop the KV of passages that no document holds, which a kill between index and store may leave; how many."""
        return self.engine.retain([self.chunk(passage) for passage in self.index.passages()])

    def chunk(self, passage: Passage) -> Chunk:
        """The chunk a passage is stored as."""
        place = {"source": passage.source, "document": passage.document_id, "span": passage.span}
        return self.engine.chunk(passage.text, {**passage.metadata, **place})

    def close(self) -> None:
        """Close the index; the engine is its owner's. Twice is harmless."""
        self.index.close()
