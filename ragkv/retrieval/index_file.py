"""The open file of an index: one connection behind one lock, and what a search reads by it.

`index_schema.py` makes and opens the file. All that a search reads is of one state
(`IndexFile.reading`). The index knows no models, tokenizers or KV.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ragkv.runtime import Check, Closing, acquired, no_check, stop_of

from .filters import EVERYTHING, Condition
from .index_errors import told
from .ingested import TextNumbers, Vectors
from .passages import Passage, with_place

# SQLite asks every `STEPS` of its machine whether to go on: about every millisecond.
STEPS = 2000
PASSAGE = """SELECT text_number, passages.id, document_id, text, span_start, span_end, page, section
    FROM passages JOIN texts ON number = text_number"""
IN_USE = "EXISTS (SELECT 1 FROM passages WHERE text_number = number)"


class IndexFile(Closing):
    """The connection to an index, its lock, and what SQLite's errors become. Thread-safe."""

    def __init__(self, uri: str, directory: Path | None, read_only: bool) -> None:
        """Connects to the file `uri` in `directory`; `None`: in memory."""
        self.directory = directory
        self.read_only = read_only
        self._lock = threading.RLock()
        self._check = no_check  # what may end a statement in the middle
        self._stopped: BaseException | None = None  # why it ended in the middle
        with self.locked():
            self._connection = sqlite3.connect(
                uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False
            )
            self._connection.executescript("PRAGMA secure_delete = ON; PRAGMA cache_spill = OFF;")
            self._connection.set_progress_handler(self._must_stop, STEPS)

    @contextmanager
    def locked(self, check: Check = no_check) -> Iterator[None]:
        """Holds the lock and turns SQLite's errors into `StoreError`. What `check` raises ends the
        wait for it.
        """
        with acquired(self._lock, check):
            try:
                yield
            except sqlite3.Error as error:
                stopped = self._stopped
                self._stopped = None
                if stopped is not None:
                    raise stopped from None
                raise told(error, self.directory) from error

    @contextmanager
    def reading(self, check: Check = no_check) -> Iterator[None]:
        """All reads of the block see one state, whatever other processes write. What `check` raises
        ends it.
        """
        with self.locked(check):
            self._connection.execute("BEGIN")
            try:
                with self._stopped_by(check):
                    yield
            finally:
                self._connection.execute("COMMIT")

    @contextmanager
    def transaction(self, check: Check = no_check) -> Iterator[None]:
        """Commits all of the block or nothing, even after a kill. Other writers wait: keep the
        block short.

        What `check` raises ends it, until it is being committed.
        """
        with self.locked(check):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                with self._stopped_by(check):
                    yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """All rows of a statement."""
        with self.locked():
            return self._connection.execute(sql, parameters).fetchall()

    def value(self, sql: str, *parameters: Any) -> Any:
        """The first column of the first row; `None` without a row."""
        rows = self.rows(sql, parameters)
        return rows[0][0] if rows else None

    def fact(self, name: str) -> str | None:
        """One of the facts about the index."""
        value: str | None = self.value("SELECT value FROM facts WHERE name = ?", name)
        return value

    def close(self) -> None:
        """Closes the connection. Closing twice is harmless."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _stopped_by(self, check: Check) -> Iterator[None]:
        """Inside the block, a statement ends with what `check` raises."""
        self._check = stop_of(check)
        try:
            yield
        finally:
            self._check = no_check

    def _must_stop(self) -> bool:
        """Whether the statement that runs must end now: SQLite asks on the thread that runs it."""
        try:
            self._check()
        except BaseException as error:
            self._stopped = error
            return True
        return False


class IndexReads:
    """What a search reads of an index, with the vectors in memory. Thread-safe."""

    def __init__(self, file: IndexFile) -> None:
        self._file = file
        self._vectors: tuple[str, TextNumbers, Vectors] | None = None  # of a revision

    def rank_by_terms(
        self, wanted: Iterable[str], k: int, where: Condition
    ) -> list[tuple[int, float]]:
        """Number and BM25 score of the best `k` texts with one of the terms; equal scores by
        ascending number.
        """
        # Quoted words are terms, whatever else they mean in SQLite's query language; `rank` is a
        # negative score.
        match = " OR ".join(f'"{term}"' for term in dict.fromkeys(wanted))
        sql = f"""SELECT rowid, -rank FROM terms WHERE terms MATCH ?
            AND EXISTS (SELECT 1 FROM passages WHERE text_number = terms.rowid AND {where.sql})
            ORDER BY rank, rowid LIMIT ?"""
        return self._file.rows(sql, [match, *where.parameters, k]) if match else []

    @property
    def held_bytes(self) -> int:
        """What `vectors` keeps in memory."""
        held = self._vectors
        return 0 if held is None else held[1].nbytes + held[2].nbytes

    def vectors(self) -> tuple[TextNumbers, Vectors]:
        """The rows (N,), (N, D) of every text in use that has vectors. Kept in memory until the
        revision changes.
        """
        with self._file.locked():
            revision = self._file.fact("revision") or ""
            if self._vectors is None or self._vectors[0] != revision:
                dimension = int(self._file.fact("dimension") or 1)
                sql = (
                    f"SELECT number, vectors FROM texts WHERE vectors IS NOT NULL AND {IN_USE} "
                    "ORDER BY number"
                )
                rows = self._file.rows(sql)
                joined = b"".join(row[1] for row in rows)
                vectors = (
                    np.frombuffer(joined, dtype="<f4")
                    .astype(np.float32, copy=False)
                    .reshape(-1, dimension)
                )
                counts = [len(row[1]) // (4 * dimension) for row in rows]
                self._vectors = (
                    revision,
                    np.repeat(np.array([row[0] for row in rows], dtype=np.int64), counts),
                    vectors,
                )
            return self._vectors[1:]

    def forget_vectors(self) -> None:
        """Frees their memory."""
        self._vectors = None

    def text_numbers(self, where: Condition = EVERYTHING) -> list[int]:
        """The texts that have a passage which meets `where`, ascending."""
        sql = f"SELECT DISTINCT text_number FROM passages WHERE {where.sql} ORDER BY text_number"
        return [row[0] for row in self._file.rows(sql, where.parameters)]

    def first_passages(self, numbers: Sequence[int], where: Condition) -> dict[int, Passage]:
        """The first passage of each text that meets `where`; texts without one are left out. Others
        are not read.
        """
        sql = f"""{PASSAGE} WHERE place IN (SELECT min(place) FROM passages
            WHERE text_number IN (SELECT value FROM json_each(?)) AND {where.sql} GROUP BY text_number)"""
        return dict(self.passages(self._file.rows(sql, [as_json(numbers), *where.parameters])))

    def passages(self, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Passage]]:
        """Text number and passage of rows of `PASSAGE`. Passages of one document share its source
        and metadata.
        """
        sql = (
            "SELECT id, source, metadata FROM documents WHERE id IN (SELECT value FROM "
            "json_each(?))"
        )
        documents = self._file.rows(sql, (as_json(list({row[2] for row in rows})),))
        shared = {name: (source, json.loads(metadata)) for name, source, metadata in documents}
        for number, passage_id, document_id, text, start, end, page, section in rows:
            source, metadata = shared[document_id]
            place = ((start, end), source, with_place(metadata, page, section), page, section)
            yield number, Passage(passage_id, document_id, text, *place)


def as_json(value: Any) -> str:
    """A value as it is stored and given to SQLite. Raises `ValueError` for numbers without JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
