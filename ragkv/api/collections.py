"""A tenant's collections: named sets of documents, each with an index, all on the tenant's one engine.

The KV of a text belongs to the tenant: collections that hold the same text share its entry, which is deleted when the
last of them drops the text. A deleted collection stays deleted: its directory is renamed first, so that a kill in
between leaves a directory that the next start removes, and not half a collection.
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
from pathlib import Path

from ragkv.encoding import WarmReport
from ragkv.engine import Engine
from ragkv.errors import InputError, QueueError
from ragkv.rag import Rag, default_chunk_tokens
from ragkv.retrieval import Document, Embedder, IngestReport, Passage, Removal
from ragkv.runtime import Check, Closing, acquired, make_private_folder, no_check

from . import schemas
from .errors import not_found

log = logging.getLogger(__name__)

COLLECTION_NAME = re.compile(schemas.NAME_PATTERN)
DEFAULT_COLLECTION = "default"  # without tenants, `ragkv ingest` fills this one
FACTS = "collection.json"
_DELETED = ".deleted-"  # prefix of the directories of deleted collections


class Collection:
    """One open collection."""

    def __init__(self, name: str, rag: Rag, created: float) -> None:
        """`created` is in seconds since the epoch."""
        self.name, self.rag, self.created = name, rag, created
        self.users = 0  # leases

    @property
    def info(self) -> schemas.Collection:
        """The collection as it is listed."""
        stats = self.rag.index.stats()
        return schemas.Collection(
            name=self.name, documents=stats.documents, chunks=stats.passages, created=self.created
        )


class Collections(Closing):
    """The collections of one tenant. Thread-safe."""

    def __init__(self, directory: Path, engine: Engine, embedder: Embedder | None) -> None:
        """`directory` is the tenant's."""
        self._home, self._directory = directory, directory / "collections"
        self._engine, self._embedder = engine, embedder
        self._table = threading.Condition()  # guards `_open` and the directories' names
        # Held from a text's removal to the drop of its KV: if two collections remove a text, the second drops its KV.
        self._dropping = threading.Lock()
        self._open: dict[str, Collection] = {}
        for leftover in self._directory.glob(f"{_DELETED}*"):  # a kill interrupted its deletion
            self._erase(leftover)

    def names(self) -> list[str]:
        """The names of all collections, sorted."""
        found = {path.parent.name for path in self._directory.glob(f"*/{FACTS}")}
        if self._command_line_index() is not None:
            found.add(DEFAULT_COLLECTION)
        return sorted(name for name in found if COLLECTION_NAME.fullmatch(name))

    def list(self) -> list[schemas.Collection]:
        """All collections, sorted by name."""
        infos = []
        for name in self.names():
            with self._lease_if_there(name) as collection:
                if collection is not None:
                    infos.append(collection.info)
        return infos

    def create(self, name: str) -> bool:
        """Create a collection unless it exists; whether it was created. Raises `InputError` for a wrong name."""
        if not COLLECTION_NAME.fullmatch(name):
            raise InputError(
                f"A collection's name is 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first, "
                f"not {name[:80]!r}."
            )
        with self._table:
            path = self._path(name)
            if (path / FACTS).is_file() or name in self.names():
                return False
            make_private_folder(path)
            draft = path / f"{FACTS}.tmp"
            draft.write_text(json.dumps({"name": name, "created": time.time()}) + "\n", encoding="utf-8")
            draft.replace(path / FACTS)
            return True

    @contextmanager
    def lease(self, name: str, param: str = "name") -> Iterator[Collection]:
        """The collection `name`, which is not deleted during the lease.

        Raises `ApiError` 404 if there is none; `param` is the request field that names it.
        """
        with self._lease_if_there(name) as collection:
            if collection is None:
                raise not_found("collection", name, param)
            yield collection

    def delete(self, name: str) -> bool:
        """Delete a collection, and the KV of texts that no other collection holds; whether it existed."""
        with self._table:
            collection = self._opened(name)
            if collection is None:
                return False
            del self._open[name]
            doomed = self._directory / f"{_DELETED}{secrets.token_hex(8)}"
            make_private_folder(self._directory)
            self._path(name).rename(doomed)  # from now on the name is free
            self._table.wait_for(lambda: collection.users == 0)
        collection.rag.close()
        self._erase(doomed)
        return True

    def ingest(
        self, collection: Collection, documents: Iterable[Document], check: Check = no_check
    ) -> tuple[IngestReport, WarmReport]:
        """Store documents in a leased collection, KV included.

        What `check` raises before the documents are in the index leaves the index as it was. After that the documents
        are stored: a `QueueError` then only ends the computing of KV, and the report counts the chunks that are left.
        """
        rag = collection.rag
        with acquired(self._dropping, check):
            report = rag.index.ingest(documents, check=check)
            self._drop(passage.text for passage in report.forgotten_passages)
        ids = (*report.added, *report.changed, *report.unchanged)
        passages = [passage for document in ids for passage in rag.index.passages(document)]
        warmed = self._warm(rag, passages, check)
        self.drop_if_deleted(collection.name, [passage.text for passage in passages])
        return report, warmed

    def _warm(self, rag: Rag, passages: Sequence[Passage], check: Check) -> WarmReport:
        """Compute the KV of `passages`, until a `QueueError` of `check`."""
        chunks = []
        try:
            for passage in passages:
                check()
                chunks.append(rag.chunk(passage))
        except QueueError:
            return WarmReport(0, 0, 0, left=len(passages))
        return self._engine.warm(chunks, check=check)

    def remove(self, collection: Collection, document_ids: Sequence[str]) -> Removal:
        """Delete documents of a leased collection, and the KV of texts that no collection holds any more."""
        with self._dropping:
            removal = collection.rag.index.delete(document_ids)
            self._drop(passage.text for passage in removal.forgotten_passages)
        return removal

    def drop_if_deleted(self, name: str, texts: Iterable[str]) -> None:
        """Drop the KV of those `texts` that were deleted from the collection `name` while their KV was computed."""
        deleted = list(texts)
        with self._lease_if_there(name) as collection:
            if collection is not None:
                deleted = [text for text in deleted if not collection.rag.index.holds(text)]
        if deleted:
            with self._dropping:
                self._drop(deleted)

    def documents(self) -> int:
        """The number of documents in all collections."""
        return sum(info.documents for info in self.list())

    def close(self) -> None:
        """Close the open collections."""
        with self._table:
            collections, self._open = list(self._open.values()), {}
        for collection in collections:
            collection.rag.close()

    @contextmanager
    def _lease_if_there(self, name: str) -> Iterator[Collection | None]:
        with self._table:
            collection = self._opened(name)
            if collection is not None:
                collection.users += 1
        try:
            yield collection
        finally:
            if collection is not None:
                with self._table:
                    collection.users -= 1
                    self._table.notify_all()

    def _command_line_index(self) -> Path | None:
        """The index that `ragkv ingest` fills; only the tenant without a name has one."""
        index = self._home / "index"
        return index if index.is_dir() and self._home.parent.name != "tenants" else None

    def _path(self, name: str) -> Path:
        own = self._directory / name
        if name == DEFAULT_COLLECTION and not own.exists():
            return self._command_line_index() or own
        return own

    def _opened(self, name: str) -> Collection | None:
        """The open collection, opened if it exists. The caller holds `_table`."""
        path, known = self._path(name), self._open.get(name)
        if known is not None and _is_at(path, known):
            return known
        self._open.pop(name, None)  # another process deleted it, and perhaps created another of that name
        if name not in self.names():
            return None
        collection = self._open[name] = Collection(name, self._open_rag(path), _created(path))
        return collection

    def _open_rag(self, path: Path) -> Rag:
        return Rag(self._engine, path, chunk_tokens=default_chunk_tokens(self._engine), embedder=self._embedder)

    def _drop(self, texts: Iterable[str]) -> None:
        """Drop the KV of those `texts` that no collection holds. The caller holds `_dropping`."""
        unheld = set(texts)
        for name in self.names() if unheld else ():
            with self._lease_if_there(name) as collection:
                if collection is not None:
                    unheld = {text for text in unheld if not collection.rag.index.holds(text)}
        self._engine.delete([self._engine.chunk(text) for text in unheld])

    def _erase(self, directory: Path) -> None:
        """Drop the KV that only a deleted collection needs, then its files."""
        try:
            with self._open_rag(directory) as rag, self._dropping:
                self._drop(passage.text for passage in rag.index.passages())
        except Exception:
            log.exception("collection_erase_failed")
        shutil.rmtree(directory, ignore_errors=True)


def _is_at(path: Path, collection: Collection) -> bool:
    return path.is_dir() and (not (path / FACTS).is_file() or _created(path) == collection.created)


def _created(path: Path) -> float:
    try:
        return float(json.loads((path / FACTS).read_text(encoding="utf-8"))["created"])
    except (OSError, ValueError, KeyError, TypeError):
        return path.stat().st_ctime
