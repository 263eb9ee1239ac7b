"""A corpus: documents, and the KV of their passages, which it keeps in step.

Ingesting encodes the KV of new passages, and deletes from every tier the KV of passages that no
document holds any more.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ragkv.config import CHUNK_TOKENS, EngineConfig
from ragkv.engine import Engine
from ragkv.entries import EncodeReport
from ragkv.errors import DocumentError, QueueError
from ragkv.home import KnownHome
from ragkv.retrieval import (
    Document,
    Embedder,
    Index,
    IngestReport,
    Passage,
    Splitter,
    resolve_embedder,
)
from ragkv.runtime import Check, Closing, no_check
from ragkv.runtime.outside import check_kind
from ragkv.types import Chunk, brief

from .files import FileOptions, FileOutcome, FileReader, Progress, nothing_read


@dataclass(frozen=True, slots=True)
class RagIngestReport:
    """The changes that an ingestion made to the index and to the store."""

    index: IngestReport
    kv: EncodeReport
    deleted_entries: int  # entries whose text no document holds any more
    files: tuple[FileOutcome, ...] = ()  # if files were ingested: what became of each
    __repr__ = brief


class Corpus(Closing):
    """The documents of an index, and the engine that has the KV of their passages."""

    def __init__(
        self,
        engine: Engine,
        directory: str | Path | None,
        *,
        chunk_tokens: int | None = None,
        embedder: Embedder | None = None,
        home: KnownHome | None = None,
        writes: bool | None = None,
    ) -> None:
        """Open or create the index at `directory` (`None`: in memory). Without an embedder, only
        BM25 is used.

        Chunks have at most `chunk_tokens` tokens; `None`: as `splitter_of` says. The home keeps
        what documents are ingested with. Documents can be changed if it `writes`; `None`: unless
        the store is read-only.
        """
        check_kind("engine", engine, Engine)
        self.splitter = splitter_of(engine, home, chunk_tokens)
        self.engine = engine
        self._embedder_folder = embedder.folder if embedder is not None else None
        self._unkept = home  # until it keeps what documents are ingested with
        self._closing = ExitStack()
        read_only = engine.config.store.read_only if writes is None else not writes
        self.index = Index(
            directory,
            self.splitter,
            embedder,
            read_only=read_only,
            before_write=self._keep,
            tenant=engine.parts.scheduler.tenant,
        )

    @classmethod
    def open(
        cls,
        home: str | Path,
        model: str = "",
        config: EngineConfig | None = None,
        *,
        engine: Engine | None = None,
        chunk_tokens: int | None = None,
        embedder: Embedder | None = None,
        writes: bool | None = None,
    ) -> Self:
        """The corpus of a home, as the commands open it, with an engine that is closed with it,
        unless one is given.

        `model`, `chunk_tokens` and `embedder` are by default those the home was made with; of a new
        home smollm2, what `splitter_of` says, and MiniLM, if it is installed. `config` is by
        default `EngineConfig.gather(None)`. Raises `ConfigError` for another model than the home's,
        and what `Engine.from_pretrained` raises.
        """
        known = KnownHome.at(home, model)
        with ExitStack() as stack:
            if engine is None:
                config = known.config(config or EngineConfig.gather(None))
                engine = Engine.from_pretrained(known.model, config)
                stack.callback(engine.close)
            embedder = embedder or resolve_embedder(
                known.kept.get("embedder"), device=engine.config.device
            )
            corpus = cls(
                engine,
                known.path / "index",
                chunk_tokens=chunk_tokens,
                embedder=embedder,
                home=known,
                writes=writes,
            )
            corpus._closing = stack.pop_all()
        return corpus

    def ingest(
        self,
        source: str | Path | Document | Iterable[str | Path | Document],
        *,
        encode: bool = True,
        on_embed: Progress | None = None,
        on_encode: Progress | None = None,
    ) -> RagIngestReport:
        """Add and update documents in the index and the store. Unchanged documents cost one look-up
        each.

        `source` is a path, paths of files and folders, or documents; of files that cannot be read
        see `ingest_files`. Without `encode` the KV is not computed now: the first question that
        needs a chunk misses it and stores it.
        """
        paths, documents = _paths_or_documents(source)
        if paths:
            read = self.ingest_files(
                paths, FileOptions(on_embed=on_embed), encode=encode, on_encode=on_encode
            )
            if (problem := nothing_read(paths, read.files)) is not None:
                raise DocumentError(problem)
            return read
        report = self.index.writer.ingest(documents, progress=on_embed)
        deleted = self._forget(report.forgotten_passages)
        ids = (*report.added, *report.changed, *report.unchanged)
        return RagIngestReport(report, self.encode(ids if encode else (), on_encode), deleted)

    def ingest_files(
        self,
        paths: Sequence[str | Path],
        options: FileOptions | None = None,
        *,
        encode: bool = True,
        on_encode: Progress | None = None,
    ) -> RagIngestReport:
        """Add and update the documents of files and folders. A file that cannot be read is logged
        and reported.

        Each file is committed when it is read, so after a kill the next call continues; then come
        the vectors of all passages, and then the KV, as `encode` computes it.
        """
        options = options or FileOptions()
        reader = FileReader(self.index, self._forget, options, self.splitter.fingerprint)
        reader.run(paths)
        if options.on_indexed is not None:
            options.on_indexed()
        embedded = self.index.writer.embed(options.on_embed)
        index = replace(_joined(reader.reports, reader.documents), embedded_texts=embedded)
        kv = self.encode(reader.documents if encode else (), on_encode)
        return RagIngestReport(index, kv, reader.deleted_entries, tuple(reader.outcomes))

    def encode(
        self,
        document_ids: Iterable[str],
        on_encode: Progress | None = None,
        check: Check = no_check,
        on_begin: Progress | None = None,
    ) -> EncodeReport:
        """Compute and store the KV of documents that is not stored. A `QueueError` that `check`
        raises ends the work, also while passages are tokenized: those that were not are left.

        `on_begin` is told how many chunks lack KV, and how many bytes it will take; of passages
        that were not tokenized, at most.

        Chunks for which the store has no room are left: nothing is evicted for KV that no question
        needed yet. What is left is computed when a question needs it first, and kept.
        """
        entries = self.engine.entries
        with entries.watching() as watch:  # of what is deleted after it was read from the index
            passages = (one for each in document_ids for one in self.index.contents.passages(each))
            texts = list(dict.fromkeys(passage.text for passage in passages))
            chunks = dict[tuple[int, ...], Chunk]()
            unread = len(texts)
            with suppress(QueueError):
                for text in texts:
                    check()
                    chunk = self.engine.chunk(text)
                    chunks[chunk.token_ids] = chunk
                    unread -= 1
            lacking, nbytes = entries.lacking(list(chunks.values()))
            if on_begin is not None:
                unread_bytes = unread * entries.encoder.entry_bytes(self.splitter.tokens)
                on_begin(len(lacking) + unread, nbytes + unread_bytes)
            report = entries.encode(lacking, on_encode, check, evict=False, watch=watch)
        present = report.present + len(chunks) - len(lacking)
        return replace(report, present=present, left=report.left + unread)

    def delete(self, document_ids: str | Iterable[str]) -> IngestReport:
        """Delete documents with their passages, and the KV of each text that no other document
        holds.
        """
        removal = self.index.writer.delete(document_ids)
        self._forget(removal.forgotten_passages)
        return removal

    def chunks(
        self, document_ids: Iterable[str] | None = None, check: Check = no_check
    ) -> list[Chunk]:
        """The chunks of the passages of documents, without metadata; `None`: of all. `check` is
        called before each.
        """
        ids = (None,) if document_ids is None else document_ids
        found = list[Chunk]()
        for passage in (passage for each in ids for passage in self.index.contents.passages(each)):
            check()
            found.append(self.engine.chunk(passage.text))
        return found

    def close(self) -> None:
        """Close the index, and the engine that `open` made."""
        with self._closing:  # also if the index cannot be closed
            self.index.close()

    def _keep(self) -> None:
        """Have the home keep what documents are ingested with, before the first is written."""
        if self._unkept is not None:
            self._unkept.keep(self.engine.config, self.splitter.tokens, self._embedder_folder)
            self._unkept = None

    def _forget(self, passages: Iterable[Passage]) -> int:
        """Delete the KV of passages, and return how many entries were deleted: none of a store that
        another process writes.
        """
        if self.engine.config.store.read_only:
            return 0
        return self.engine.entries.delete([self.engine.chunk(passage.text) for passage in passages])


def splitter_of(
    engine: Engine, home: KnownHome | None = None, chunk_tokens: int | None = None
) -> Splitter:
    """Splits documents into chunks of `chunk_tokens`. If it is `None`, the home's size is taken, or
    `CHUNK_TOKENS` in a new home.
    """
    known = home.made_with.get("chunk_tokens") if home is not None else None
    tokens = chunk_tokens or known or CHUNK_TOKENS
    return Splitter(engine.model.count_tokens, tokens, tokenizer_id=engine.model.identity.tokenizer)


def _paths_or_documents(source: Any) -> tuple[list[str | Path], list[Document]]:
    """The paths or the documents that `source` has. Raises `TypeError` for anything else, and for a
    mixture.
    """
    is_one = isinstance(source, str | Path | Document) or not isinstance(source, Iterable)
    items = [source] if is_one else list(source)
    paths = [item for item in items if isinstance(item, str | Path)]
    documents = [item for item in items if isinstance(item, Document)]
    if len(items) not in (len(paths), len(documents)):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise TypeError(
            f"Corpus.ingest takes a path, paths or documents, all of one kind, not {kinds}. "
            "Make a Document(id, text) of each text, or give the path of a file or folder."
        )
    return paths, documents


def _joined(reports: Sequence[IngestReport], documents: Sequence[str]) -> IngestReport:
    """The reports of many files as one. `documents` are all that the files hold; most may be
    unchanged.
    """
    names = ("added", "changed", "deleted", "removed_passages", "forgotten_passages")
    joined: dict[str, Any] = {
        name: tuple(item for report in reports for item in getattr(report, name)) for name in names
    }
    touched = {*joined["added"], *joined["changed"]}
    unchanged = tuple(name for name in documents if name not in touched)
    return IngestReport(
        unchanged=unchanged, embedded_texts=sum(one.embedded_texts for one in reports), **joined
    )
