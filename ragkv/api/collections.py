"""A tenant's collections: named sets of documents, each with an index, all over the tenant's one engine.

A text's KV belongs to the tenant: two collections that hold the same text share its entry, and it goes when the last of
them lets go of it. Deleted means gone: a collection's directory is renamed first, so that a kill in between leaves
something to bury, not something to find.
"""

import json
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ragkv.engine import Engine, WarmReport
from ragkv.errors import InputError
from ragkv.rag import Rag, default_chunk_tokens
from ragkv.retrieval import Document, Embedder, IngestReport, Removal
from ragkv.runtime import Closing

log = logging.getLogger(__name__)

COLLECTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FACTS = "collection.json"
DEFAULT_COLLECTION = "default"  # what `ragkv ingest` fills, where no tenant is named
_BURIED = ".deleted-"


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """A collection as it is listed."""

    name: str
    documents: int
    chunks: int
    created: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Stored:
    """What an ingestion did."""

    index: IngestReport
    kv: WarmReport


class Collection:
    """One collection, open. Its methods hold it open while they run."""

    def __init__(self, name: str, rag: Rag, created: float) -> None:
        self.name, self.rag, self.created = name, rag, created
        self.users = 0
        self.deleted = False

    @property
    def info(self) -> CollectionInfo:
        """What it holds."""
        stats = self.rag.index.stats()
        return CollectionInfo(self.name, stats.documents, stats.passages, self.created)


class Collections(Closing):
    """The collections of one tenant. Thread-safe."""

    def __init__(self, directory: Path, engine: Engine, embedder: Embedder | None) -> None:
        """`directory` is the tenant's."""
        self._home, self._directory = directory, directory / "collections"
        self._engine, self._embedder = engine, embedder
        self._changed = threading.Condition()  # the books
        self._letting_go = threading.Lock()  # so that of two who let go of a text one sees that nobody holds it
        self._open: dict[str, Collection] = {}
        for leftover in self._directory.glob(f"{_BURIED}*"):  # a kill came before its funeral
            self._bury(leftover)

    def names(self) -> list[str]:
        """Of every collection, sorted."""
        found = {path.parent.name for path in self._directory.glob(f"*/{FACTS}")}
        if (self._home / "index").is_dir() and self._home.parent.name != "tenants":
            found.add(DEFAULT_COLLECTION)
        return sorted(name for name in found if COLLECTION_NAME.fullmatch(name))

    def list(self) -> list[CollectionInfo]:
        """Every collection, sorted by name."""
        infos = []
        for name in self.names():
            with self.lease(name) as collection:
                if collection is not None:
                    infos.append(collection.info)
        return infos

    def create(self, name: str) -> bool:
        """Make sure there is a collection of that name; whether it was made now. Raises `InputError`."""
        if not COLLECTION_NAME.fullmatch(name):
            raise InputError(
                f"A collection's name is 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first, "
                f"not {name[:80]!r}."
            )
        with self._changed:
            path = self._path(name)
            if (path / FACTS).is_file() or name in self.names():
                return False
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = path / f"{FACTS}.tmp"
            draft.write_text(json.dumps({"name": name, "created": time.time()}) + "\n", encoding="utf-8")
            draft.replace(path / FACTS)
            return True

    @contextmanager
    def lease(self, name: str) -> Iterator[Collection | None]:
        """The collection of that name, which is not deleted meanwhile; `None` if there is none."""
        with self._changed:
            collection = self._opened(name)
            if collection is not None:
                collection.users += 1
        try:
            yield collection
        finally:
            if collection is not None:
                with self._changed:
                    collection.users -= 1
                    self._changed.notify_all()

    def delete(self, name: str) -> bool:
        """Delete a collection, its documents, and the KV of texts no other collection has; whether there was one."""
        with self._changed:
            collection = self._opened(name)
            if collection is None:
                return False
            collection.deleted = True
            del self._open[name]
            grave = self._directory / f"{_BURIED}{secrets.token_hex(8)}"
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path(name).rename(grave)  # from here on there is none of that name
            self._changed.wait_for(lambda: collection.users == 0)
        collection.rag.close()
        self._bury(grave)
        return True

    def ingest(self, collection: Collection, documents: Iterable[Document]) -> Stored:
        """Bring a leased collection to these documents, KV included."""
        rag = collection.rag
        with self._letting_go:
            report = rag.index.ingest(documents)
            self._let_go(passage.text for passage in report.forgotten_passages)
        ids = (*report.added, *report.changed, *report.unchanged)
        wanted = [passage for document in ids for passage in rag.index.passages(document)]
        kv = self._engine.warm([rag.chunk(passage) for passage in wanted])
        self.let_go_if_gone(collection.name, [passage.text for passage in wanted])
        return Stored(report, kv)

    def remove(self, collection: Collection, document_ids: Sequence[str]) -> Removal:
        """Delete documents of a leased collection, and the KV of texts that nobody holds any more."""
        with self._letting_go:
            removal = collection.rag.index.delete(document_ids)
            self._let_go(passage.text for passage in removal.forgotten_passages)
        return removal

    def let_go_if_gone(self, name: str, texts: Iterable[str]) -> None:
        """Drop the KV of `texts`, found in the collection `name`, which were deleted while it was being made."""
        gone = list(texts)
        with self.lease(name) as collection:
            if collection is not None:
                gone = [text for text in gone if not collection.rag.index.holds(text)]
        if gone:
            with self._letting_go:
                self._let_go(gone)

    def documents(self) -> int:
        """How many documents all collections hold."""
        return sum(info.documents for info in self.list())

    def close(self) -> None:
        """Close the open ones. Twice is harmless."""
        with self._changed:
            collections, self._open = list(self._open.values()), {}
        for collection in collections:
            collection.rag.close()

    def _path(self, name: str) -> Path:
        own = self._directory / name
        if name == DEFAULT_COLLECTION and not own.exists() and self._home.parent.name != "tenants":
            line = self._home / "index"
            return line if line.is_dir() else own
        return own

    def _opened(self, name: str) -> Collection | None:
        """The open collection; opened if there is one. The caller has the books."""
        path, known = self._path(name), self._open.get(name)
        if known is not None and _is_at(path, known):
            return known
        if known is not None:  # another process deleted it, and perhaps made another of that name
            known.deleted = True
            del self._open[name]
        if name not in self.names():
            return None
        collection = self._open[name] = Collection(name, self._opened_at(path), _created(path))
        return collection

    def _opened_at(self, path: Path) -> Rag:
        return Rag(self._engine, path, chunk_tokens=default_chunk_tokens(self._engine), embedder=self._embedder)

    def _let_go(self, texts: Iterable[str]) -> None:
        """Drop the KV of those of `texts` that no collection holds. The caller has `_letting_go`."""
        unheld = set(texts)
        for name in self.names() if unheld else ():
            with self.lease(name) as collection:
                if collection is not None:
                    unheld = {text for text in unheld if not collection.rag.index.holds(text)}
        self._engine.delete([self._engine.chunk(text) for text in unheld])

    def _bury(self, grave: Path) -> None:
        """Drop what only a deleted collection held, then its files."""
        try:
            with self._opened_at(grave) as rag, self._letting_go:
                self._let_go(passage.text for passage in rag.index.passages())
        except Exception:
            log.exception("collection_burial_failed")
        shutil.rmtree(grave, ignore_errors=True)


def _is_at(path: Path, collection: Collection) -> bool:
    return path.is_dir() and (not (path / FACTS).is_file() or _created(path) == collection.created)


def _created(path: Path) -> float:
    try:
        return float(json.loads((path / FACTS).read_text(encoding="utf-8"))["created"])
    except (OSError, ValueError, KeyError, TypeError):
        return path.stat().st_ctime


__all__ = ["Collection", "CollectionInfo", "Collections", "Stored"]
