"""Changes an index: adds, replaces and deletes documents.

An ingestion first reads and splits, then embeds the new texts, then changes the index in one
transaction. A kill leaves the old or the new state, and the vectors computed so far are not lost.
Each distinct text is embedded once. A passage that two documents share is found once, as a passage
of the first document. It stays as long as one of the documents does.

A caller that stores KV of passages deletes that of `IngestReport.forgotten_passages`.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout

from ragkv.errors import InputError, ModelError, StoreLockedError, StoreReadOnlyError
from ragkv.runtime import Check, acquired, counted, no_check
from ragkv.runtime.outside import check_kind

from .embedders import NO_EMBEDDER, Embedder
from .index_schema import put_fact, put_revision
from .index_writes import IndexWrites
from .ingested import Document, FileRecord, IngestReport
from .passages import Passage
from .splitter import Splitter

if TYPE_CHECKING:
    from .index import Index

# The vectors of `EMBED_BATCH` texts are committed together.
EMBED_BATCH = 64
Progress = Callable[[int, int], None]  # number of texts embedded so far, number of texts to embed
OnForget = Callable[[Sequence[Passage]], None]


@dataclass(slots=True)
class _Plan:
    """What an ingestion is going to do."""

    # document id -> content hash, of every document seen
    hashes: dict[str, str] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    # document, hash, passages
    writes: list[tuple[Document, str, list[Passage]]] = field(default_factory=list)

    @property
    def passages(self) -> list[Passage]:
        """The passages of all documents to be written."""
        return [passage for _, _, passages in self.writes for passage in passages]


@dataclass(eq=False)
class Ingestion:
    """What changes an index."""

    index: "Index"
    writes: IndexWrites  # to the file of the index
    splitter: Splitter | None  # needed to ingest
    embedder: Embedder | None
    before_write: Callable[[], None]  # called before documents are written
    tenant: str  # the tenant whose turn it waits for at the embedder
    # held by the one thread that writes
    _writing: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def notice(self) -> str | None:
        """Why retrieval is worse than it could be, in one sentence; `None` if it is not."""
        if self.embedder is None:
            return NO_EMBEDDER
        stats = self.index.contents.stats()
        if missing := stats.texts - stats.embedded_texts:
            return (
                f"{missing} of {counted(stats.texts, 'text')} found by BM25 only, without a "
                "vector yet: ingest again."
            )
        return None

    def ingest(
        self,
        documents: Iterable[Document],
        *,
        split: Mapping[str, list[Passage]] | None = None,
        progress: Progress | None = None,
        check: Check = no_check,
        file: FileRecord | None = None,
        on_forget: OnForget | None = None,
        embed: bool = True,
    ) -> IngestReport:
        """Adds these documents or replaces their old contents, all or none. An unchanged document
        costs one hash.

        `file` says that they are all that this file holds: it is recorded with them, and documents
        that the file held before are deleted. The changed documents of one call are held in memory
        until it ends: feed very large corpora in several calls. What `check` raises between two
        batches ends the call: no document is changed, and the vectors computed so far are kept for
        the next call.

        `split` has the passages of documents, by their ids, that this splitter has split already.
        `on_forget` is called with `forgotten_passages` before the change is committed, and undoes
        it if it raises. Without `embed` new texts are found by BM25 only, until `embed` is called.
        """
        with self._writer(check):
            plan = self._plan(documents, split or {}, check)
            gone = self._vanished(file, plan) if file is not None else []
            texts = (passage.text for passage in plan.passages)
            embedded = self._embed(texts, progress, check) if embed else 0
            if plan.writes:
                self.before_write()
            with self.index.file.transaction(check):
                old = [
                    passage
                    for name in [*plan.changed, *gone]
                    for passage in self.index.contents.passages(name)
                ]
                for write in plan.writes:
                    self.writes.put_document(*write)
                if file is not None:
                    self.writes.put_file(replace(file, documents=plan.hashes))
                kept = {passage.id for passage in plan.passages}
                removed = tuple(passage for passage in old if passage.id not in kept)
                forgotten = self._forget(gone, removed, on_forget)
                if plan.writes or gone or embedded:
                    put_revision(self.index.file)
        added = tuple(plan.added)
        changed = tuple(plan.changed)
        unchanged = tuple(plan.unchanged)
        return IngestReport(added, changed, unchanged, tuple(gone), removed, forgotten, embedded)

    def embed(self, progress: Progress | None = None, check: Check = no_check) -> int:
        """Embeds the texts that have no vector, and returns how many; what `check` raises keeps
        those made so far.
        """
        with self._writer(check):
            embedded = self._embed((), progress, check)
            if embedded:
                with self.index.file.transaction(check):
                    put_revision(self.index.file)
        return embedded

    def delete(
        self,
        document_ids: str | Iterable[str],
        on_forget: OnForget | None = None,
        check: Check = no_check,
    ) -> IngestReport:
        """Deletes documents, their passages and vectors. Unknown ids are ignored. `on_forget` as
        for `ingest`; what `check` raises leaves all as it was.
        """
        check_kind("document_ids", document_ids, str, Iterable)
        wanted = (
            [document_ids] if isinstance(document_ids, str) else list(dict.fromkeys(document_ids))
        )
        with self._writer(check), self.index.file.transaction(check):
            here = self.index.contents.document_hashes(wanted)
            there = tuple(name for name in wanted if name in here)
            passages = tuple(
                passage for name in there for passage in self.index.contents.passages(name)
            )
            forgotten = self._forget(there, passages, on_forget)
            if there:
                put_revision(self.index.file)
        return IngestReport(deleted=there, removed_passages=passages, forgotten_passages=forgotten)

    def file_record(self, path: str) -> FileRecord | None:
        """What is known of a file that was ingested, by its absolute path."""
        rows = self.index.file.rows("SELECT * FROM files WHERE path = ?", (path,))
        if not rows:
            return None
        path, size, mtime_ns, found, method, documents = rows[0]
        return FileRecord(path, size, mtime_ns, found, method, json.loads(documents))

    def file_digests(self) -> dict[str, str]:
        """The absolute paths of the files that were ingested, sorted, and the digests of their
        bytes.
        """
        return dict(self.index.file.rows("SELECT path, digest FROM files ORDER BY path"))

    def put_file(self, record: FileRecord) -> None:
        """Replaces what is known of a file whose documents stay as they are."""
        with self._writer(), self.index.file.transaction():
            self.writes.put_file(record)

    def delete_file(self, path: str) -> IngestReport:
        """Deletes what came from a file: its documents, unless they were replaced since, and its
        record.
        """
        record = self.file_record(path)
        if record is None:
            return IngestReport()
        removal = self.delete(self._unreplaced(record))
        with self._writer(), self.index.file.transaction():
            self.writes.delete_file(path)
        return removal

    # The steps of an ingestion

    @contextmanager
    def _writer(self, check: Check = no_check) -> Iterator[None]:
        """Admits one writer at a time: other threads wait, another process gets
        `StoreLockedError`.
        """
        if self.index.file.read_only:
            raise StoreReadOnlyError(
                f"The index at {self.index.file.directory} was opened read-only. Open it for writing."
            )
        with acquired(self._writing, check):
            if self.index.file.directory is None:
                yield
                return
            try:
                lock = FileLock(self.index.file.directory / "writer.lock", timeout=0).acquire()
            except Timeout as error:
                message = (
                    f"Another process is writing to the index at {self.index.file.directory}. Try "
                    "again when it is done."
                )
                raise StoreLockedError(message) from error
            with lock:
                yield

    def _plan(
        self, documents: Iterable[Document], split: Mapping[str, list[Passage]], check: Check
    ) -> _Plan:
        """Finds new and changed documents and splits them; writes nothing."""
        plan = _Plan()
        for document in documents:
            check()
            if self.splitter is None:
                raise InputError(
                    "This index was opened without a splitter and cannot ingest. Pass "
                    "splitter=Splitter(...)."
                )
            content_hash = document.content_hash(self.splitter.fingerprint)
            if document.id in plan.hashes:
                if plan.hashes[document.id] != content_hash:
                    raise InputError(
                        f"Two different documents have the id {document.id!r}. Give each its own."
                    )
                continue
            plan.hashes[document.id] = content_hash
            stored = self.index.contents.document_hashes([document.id]).get(document.id)
            if stored == content_hash:
                plan.unchanged.append(document.id)
                continue
            (plan.added if stored is None else plan.changed).append(document.id)
            passages = split.get(document.id) or self.splitter.split(document, check)
            plan.writes.append((document, content_hash, passages))
        return plan

    def _vanished(self, file: FileRecord, plan: _Plan) -> list[str]:
        """The documents that the file held before and does not hold any more."""
        before = self.file_record(file.path)
        return (
            [name for name in self._unreplaced(before) if name not in plan.hashes]
            if before is not None
            else []
        )

    def _unreplaced(self, record: FileRecord) -> list[str]:
        """The documents of a file that are here as the file had them."""
        here = self.index.contents.document_hashes(record.documents)
        return [
            name
            for name, content_hash in record.documents.items()
            if here.get(name) == content_hash
        ]

    def _embed(self, texts: Iterable[str], progress: Progress | None, check: Check) -> int:
        """Embeds new `texts` and all others without a vector, committed batch by batch; returns how
        many.
        """
        if (embedder := self.embedder) is None:
            return 0
        todo = self.writes.without_vectors(dict.fromkeys(texts))
        for start in range(0, len(todo), EMBED_BATCH):
            if progress is not None:
                progress(start, len(todo))
            batch = todo[start : start + EMBED_BATCH]
            vectors = embedder.embed_texts(batch, check, self.tenant)
            if not all(
                v.ndim == 2 and v.shape[1] == embedder.dimension and np.isfinite(v).all()
                for v in vectors
            ):
                raise ModelError(
                    f"Embedder {embedder.name} gave vectors of a wrong shape, or not finite ones."
                )
            with self.index.file.transaction(check):
                put_fact(self.index.file, "embedder_id", embedder.id)
                put_fact(self.index.file, "embedder_name", embedder.name)
                put_fact(self.index.file, "dimension", str(embedder.dimension))
                self.writes.put_vectors(batch, vectors)
        if progress is not None and todo:
            progress(len(todo), len(todo))
        return len(todo)

    def _forget(
        self, gone: Iterable[str], removed: Sequence[Passage], on_forget: OnForget | None
    ) -> tuple[Passage, ...]:
        """Deletes the documents `gone`, then all unused texts; returns those of `removed` whose
        text was deleted.
        """
        for name in gone:
            self.writes.delete_document(name)
        held = self.index.contents.held(passage.text for passage in removed)
        forgotten = tuple(passage for passage in removed if passage.text not in held)
        self.writes.delete_unused_texts()
        if on_forget is not None:
            on_forget(forgotten)
        return forgotten
