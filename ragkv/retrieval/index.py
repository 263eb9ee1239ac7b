"""The index: documents go in, hits come out, and everything is stored in one directory.

An ingestion first reads and splits, then embeds the new texts, then changes the index in one transaction. A kill leaves
the old or the new state, and the vectors computed so far are not lost. Embedding is by distinct text: a passage that
two documents share is embedded once and found once (`Hit.duplicates` has the others), and stays while one of the
documents does.

The index knows no models, tokenizers or KV. A caller that stores KV of passages encodes `IngestReport.new_passages` and
deletes the KV of `forgotten_passages`.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from ragkv.errors import ConfigError, InputError, ModelError, StoreLockedError, StoreReadOnlyError
from ragkv.runtime import Check, Closing, acquired, no_check

from .corpus import Corpus, drop_snapshots
from .database import open_database
from .embedders import Embedder, how_to_embed
from .filters import Where, sql_of
from .rerankers import Reranker
from .retrievers import RETRIEVERS, ScoredText, retriever_type
from .splitter import Splitter
from .values import Document, DocumentSummary, FileRecord, Hit, IndexStats, IngestReport, Passage, Removal

logger = logging.getLogger(__name__)

# Of a query `QUERY_CHARS` are searched; an embedder reads far fewer.
QUERY_CHARS = 10_000
# The vectors of `EMBED_BATCH` texts are committed together.
EMBED_BATCH = 64
Progress = Callable[[int, int], None]  # number of texts embedded so far, number of texts to embed
OnForget = Callable[[Sequence[Passage]], None]


def _no_note(passages: Sequence[Passage]) -> None:
    """The caller notes nothing."""


@dataclass(slots=True)
class _Plan:
    """What an ingestion is going to do."""

    hashes: dict[str, str] = field(default_factory=dict)  # document id -> content hash, of every document seen
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    writes: list[tuple[Document, str, list[Passage]]] = field(default_factory=list)  # document, hash, passages

    @property
    def passages(self) -> list[Passage]:
        """The passages of all documents to be written."""
        return [passage for _, _, passages in self.writes for passage in passages]


class Index(Closing):
    """Documents, passages, vectors and term statistics in one directory; `None`: in memory. Thread-safe."""

    def __init__(
        self,
        directory: str | Path | None,
        *,
        splitter: Splitter | None = None,
        embedder: Embedder | None = None,
        read_only: bool = False,
    ) -> None:
        """Opens or creates an index. Ingesting needs a `splitter`. Without an `embedder` BM25 works alone."""
        self.directory = None if directory is None else Path(directory)
        self._splitter = splitter
        self._embedder = embedder
        self._database = open_database(self.directory, read_only)
        self._writing = threading.Lock()
        self._corpus_lock = threading.Lock()
        self._corpus: Corpus | None = None
        self._check_embedder()
        if embedder is None and self.notice:
            logger.warning(self.notice)

    # Reading

    @property
    def notice(self) -> str | None:
        """Why retrieval is worse than it could be, in one sentence; `None` if it is not."""
        if self._embedder is None:
            return f"No embedder: retrieval uses BM25 alone. {how_to_embed()}"
        stats = self.stats()
        if missing := stats.texts - stats.embedded_texts:
            return f"{missing} of {stats.texts} texts have no vector yet and are found by BM25 only: ingest again."
        return None

    def search(
        self,
        query: str,
        k: int = 5,
        *,
        retriever: str | None = None,
        where: Where | None = None,
        reranker: Reranker | None = None,
        rerank_depth: int = 50,
        check: Check = no_check,
    ) -> list[Hit]:
        """The best `k` passages, fewer if no more match. A blank query finds nothing; of a long one the start counts.

        `retriever` is a name in `RETRIEVERS`; the default is "fused" with an embedder and "bm25" without. `where`
        filters by metadata before the ranking. A `reranker` scores the best `rerank_depth` again. What `check` raises
        between two steps ends the search.
        """
        if k < 1:
            raise InputError(f"k is {k}; ask for at least 1 passage.")
        if retriever is None:
            retriever = "bm25" if self._embedder is None else "fused"
        build = retriever_type(retriever).build
        condition, parameters = sql_of(where or {})
        query = query[:QUERY_CHARS].encode("utf-8", "replace").decode()  # a shell may pass half a surrogate pair
        if not query.strip():
            return []
        depth = k if reranker is None else max(k, rerank_depth)
        for _ in range(3):  # search again if a deletion removed a hit between ranking and reading
            check()
            allowed = self._database.text_numbers(condition, parameters) if where else None
            found = self._current_corpus().build_once(build, check)
            check()
            ranked = found.search(query, depth, allowed)
            hits = self._hits(ranked, condition, parameters)
            if len(hits) == len(ranked):
                break
        return hits if reranker is None else reranker.rerank(query, hits, k)

    def _hits(self, ranked: Sequence[ScoredText], condition: str, parameters: Sequence[object]) -> list[Hit]:
        found = self._database.passages_of_texts([scored.number for scored in ranked], condition, parameters)
        present = [(scored, found[scored.number]) for scored in ranked if scored.number in found]
        return [
            Hit(passages[0], scored.score, rank, tuple(passages[1:]))
            for rank, (scored, passages) in enumerate(present, start=1)
        ]

    def _current_corpus(self) -> Corpus:
        """The corpus of the latest revision, even if another process made it."""
        with self._corpus_lock:
            revision = self._database.revision()
            if self._corpus is None or self._corpus.revision != revision:
                self._corpus = Corpus(self._database, revision, self._embedder)
            return self._corpus

    def document(self, document_id: str) -> Document | None:
        """A document as it was ingested."""
        return self._database.document(document_id)

    def document_ids(self) -> list[str]:
        """Every document id, in order of ingestion."""
        return self._database.document_ids()

    def document_page(self, after: int, limit: int) -> list[DocumentSummary]:
        """The next `limit` documents in order of ingestion, after the position `after`; 0: from the beginning."""
        return self._database.document_page(after, limit)

    def positions(self, document_ids: Iterable[str]) -> dict[str, int]:
        """A number for each document that is higher for later ones; unknown ids are left out."""
        return self._database.positions(document_ids)

    def passages(self, document_id: str | None = None) -> list[Passage]:
        """The passages of one document, or all, in order."""
        return self._database.passages(document_id)

    def stats(self) -> IndexStats:
        """Counts, and the embedder."""
        return self._database.stats()

    def file_record(self, path: str) -> FileRecord | None:
        """What is known of a file that was ingested, by its absolute path."""
        return self._database.file_record(path)

    def file_paths(self) -> list[str]:
        """The absolute paths of the files that were ingested, sorted."""
        return self._database.file_paths()

    def holds_documents_of(self, record: FileRecord) -> bool:
        """Whether the documents of a file are here as the file had them."""
        return self._database.document_hashes(record.documents) == record.documents

    # Writing

    def ingest(
        self,
        documents: Iterable[Document],
        *,
        prune: bool = False,
        progress: Progress | None = None,
        check: Check = no_check,
        file: FileRecord | None = None,
        on_forget: OnForget = _no_note,
    ) -> IngestReport:
        """Adds these documents or replaces their old contents, all or none. An unchanged document costs one hash.

        With `prune`, all other documents are deleted. `file` says that they are all that this file holds: it is
        recorded with them, and documents that the file held before are deleted. The changed documents of one call are
        held in memory until it ends: feed very large corpora in several calls. What `check` raises between two batches
        ends the call: no document is changed, and the vectors computed so far are kept for the next call.

        `on_forget` is called with `forgotten_passages` before the change is committed, and undoes it if it raises.
        """
        with self._writer(check):
            plan = self._plan(documents, check)
            gone = [name for name in self.document_ids() if name not in plan.hashes] if prune else []
            if prune and not plan.hashes and gone:
                raise InputError(f"Pruning to no documents would delete all {len(gone)}. Use delete() if you mean it.")
            gone += self._vanished(file, plan) if file is not None and not prune else []
            embedded = self._embed(plan, progress, check)
            with self._database.transaction():
                old = [passage for name in [*plan.changed, *gone] for passage in self.passages(name)]
                for write in plan.writes:
                    self._database.put_document(*write)
                for name in gone:
                    self._database.delete_document(name)
                if file is not None:
                    self._database.put_file(replace(file, documents=plan.hashes))
                before, after = {passage.id for passage in old}, {passage.id for passage in plan.passages}
                new = tuple(passage for passage in plan.passages if passage.id not in before)
                removed = tuple(passage for passage in old if passage.id not in after)
                forgotten = self._delete_unused_texts(removed)
                on_forget(forgotten)
                if new or removed or embedded:
                    self._database.new_revision()
        return IngestReport(
            tuple(plan.added),
            tuple(plan.changed),
            tuple(plan.unchanged),
            deleted=tuple(gone),
            new_passages=new,
            removed_passages=removed,
            forgotten_passages=forgotten,
            embedded_texts=embedded,
        )

    def delete(self, document_ids: str | Iterable[str], on_forget: OnForget = _no_note) -> Removal:
        """Deletes documents, their passages and vectors. Unknown ids are ignored. `on_forget` as for `ingest`."""
        wanted = [document_ids] if isinstance(document_ids, str) else list(dict.fromkeys(document_ids))
        with self._writer(), self._database.transaction():
            there = tuple(name for name in wanted if self._database.document_hash(name) is not None)
            passages = tuple(passage for name in there for passage in self._database.passages(name))
            for name in there:
                self._database.delete_document(name)
            forgotten = self._delete_unused_texts(passages)
            on_forget(forgotten)
            if there:
                self._database.new_revision()
        return Removal(there, passages, forgotten)

    def put_file(self, record: FileRecord) -> None:
        """Replaces what is known of a file whose documents stay as they are."""
        with self._writer(), self._database.transaction():
            self._database.put_file(record)

    def delete_file(self, path: str) -> Removal:
        """Deletes what came from a file: its documents, unless they were replaced since, and its record."""
        record = self.file_record(path)
        if record is None:
            return Removal((), (), ())
        removal = self.delete(self._unreplaced(record))
        with self._writer(), self._database.transaction():
            self._database.delete_file(path)
        return removal

    def close(self) -> None:
        """Closes the database and the files of snapshots. Closing twice is harmless."""
        with self._corpus_lock:
            self._corpus = None  # it maps files of a snapshot
        self._database.close()

    # The steps of an ingestion

    @contextmanager
    def _writer(self, check: Check = no_check) -> Iterator[None]:
        """Admits one writer at a time: other threads wait, another process gets `StoreLockedError`."""
        if self._database.read_only:
            raise StoreReadOnlyError(f"The index at {self.directory} was opened read-only. Open it for writing.")
        with acquired(self._writing, check):
            if self.directory is None:
                yield
                return
            try:
                lock = FileLock(self.directory / "writer.lock", timeout=0).acquire()
            except Timeout as error:
                message = f"Another process is writing to the index at {self.directory}. Try again when it is done."
                raise StoreLockedError(message) from error
            with lock:
                yield
                drop_snapshots(self.directory, RETRIEVERS, self._database.revision())

    def _plan(self, documents: Iterable[Document], check: Check) -> _Plan:
        """Finds new and changed documents and splits them; writes nothing."""
        plan = _Plan()
        for document in documents:
            check()
            if self._splitter is None:
                raise InputError(
                    "This index was opened without a splitter and cannot ingest. Pass splitter=Splitter(...)."
                )
            content_hash = document.content_hash(self._splitter.fingerprint)
            if document.id in plan.hashes:
                if plan.hashes[document.id] != content_hash:
                    raise InputError(f"Two different documents have the id {document.id!r}. Give each its own.")
                continue
            plan.hashes[document.id] = content_hash
            stored = self._database.document_hash(document.id)
            if stored == content_hash:
                plan.unchanged.append(document.id)
                continue
            (plan.added if stored is None else plan.changed).append(document.id)
            plan.writes.append((document, content_hash, self._splitter.split(document, check)))
        return plan

    def _vanished(self, file: FileRecord, plan: _Plan) -> list[str]:
        """The documents that the file held before and does not hold any more."""
        before = self.file_record(file.path)
        return [name for name in self._unreplaced(before) if name not in plan.hashes] if before is not None else []

    def _unreplaced(self, record: FileRecord) -> list[str]:
        """The documents of a file that are here as the file had them."""
        here = self._database.document_hashes(record.documents)
        return [name for name, content_hash in record.documents.items() if here.get(name) == content_hash]

    def _embed(self, plan: _Plan, progress: Progress | None, check: Check) -> int:
        """Embeds every text that has no vector, committed batch by batch; returns how many texts were embedded."""
        if (embedder := self._embedder) is None:
            return 0
        texts = dict.fromkeys(passage.text for passage in plan.passages)
        todo = [text for text in texts if not self._database.has_vectors(text)]
        todo += [text for text in self._database.texts_without_vectors() if text not in texts]
        for start in range(0, len(todo), EMBED_BATCH):
            if progress is not None:
                progress(start, len(todo))
            batch = todo[start : start + EMBED_BATCH]
            vectors = embedder.embed_texts(batch, check)
            if not all(v.ndim == 2 and v.shape[1] == embedder.dimension and np.isfinite(v).all() for v in vectors):
                raise ModelError(f"Embedder {embedder.name} gave vectors of a wrong shape, or not finite ones.")
            with self._database.transaction():
                self._record(embedder)
                self._database.put_vectors(batch, vectors)
        if progress is not None and todo:
            progress(len(todo), len(todo))
        return len(todo)

    def _delete_unused_texts(self, removed: Iterable[Passage]) -> tuple[Passage, ...]:
        """Deletes the texts that no passage uses; returns the passages of `removed` whose text was deleted."""
        forgotten = tuple(passage for passage in removed if not self._database.in_use(passage.text))
        self._database.delete_unused_texts()
        return forgotten

    def _check_embedder(self) -> None:
        recorded = self._database.fact("embedder_id")
        if self._embedder is not None and recorded not in (None, self._embedder.id):
            name, dimension = self._database.fact("embedder_name"), self._database.fact("dimension")
            self._database.close()
            raise ConfigError(
                f"The index at {self.directory} holds vectors of {name} ({dimension} dimensions, {recorded}), "
                f"not of {self._embedder.name} ({self._embedder.id}). "
                "Open it with that embedder, or ingest into a new directory."
            )

    def _record(self, embedder: Embedder) -> None:
        if self._database.fact("embedder_id") is None:
            self._database.set_fact("embedder_id", embedder.id)
            self._database.set_fact("embedder_name", embedder.name)
            self._database.set_fact("dimension", str(embedder.dimension))
