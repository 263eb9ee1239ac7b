"""What a search reads of an index, under its lock, and what SQLite's errors become.

`index_file.py` opens the file. All that a search reads is of one state (`reading`).
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ragkv.errors import StoreError, StoreReadOnlyError
from ragkv.runtime import Check, Closing, no_check, stop_of

from .filters import EVERYTHING, Condition
from .passages import Passage, with_place
from .values import TextNumbers, Vectors

PASSAGE = """SELECT text_number, passages.id, document_id, text, span_start, span_end, page, section
    FROM passages JOIN texts ON number = text_number"""
IN_USE = "EXISTS (SELECT 1 FROM passages WHERE text_number = number)"


class IndexReads(Closing):
    """An open index, as a search reads it. Thread-safe."""

    directory: Path | None  # `None`: in memory
    _connection: sqlite3.Connection
    _lock: threading.RLock
    _vectors: tuple[str, TextNumbers, Vectors] | None  # of a revision
    _check: Check  # what may end a statement in the middle
    _stopped: BaseException | None  # why it ended in the middle

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock and turns SQLite's errors into `StoreError`."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                stopped = self._stopped
                self._stopped = None
                if stopped is not None:
                    raise stopped from None
                why = str(error)
                if "readonly" in why:
                    raise StoreReadOnlyError(
                        f"The index at {self.directory} cannot be written: {why}."
                    ) from error
                if "disk is full" in why:
                    hint = "Free some space: the index is as it was before."
                elif "not a database" in why or "malformed" in why:
                    hint = "The file is damaged: delete the directory and ingest again."
                else:
                    hint = (
                        "Check that the directory can be read and written, and that no other "
                        "process locks it."
                    )
                raise StoreError(f"The index at {self.directory} failed: {why}. {hint}") from error

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

    @contextmanager
    def reading(self, check: Check = no_check) -> Iterator[None]:
        """All reads of the block see one state, whatever other processes write. What `check` raises
        ends it.
        """
        with self._locked():
            self._connection.execute("BEGIN")
            try:
                with self._stopped_by(check):
                    yield
            finally:
                self._connection.execute("COMMIT")

    def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._locked():
            return self._connection.execute(sql, parameters).fetchall()

    def _value(self, sql: str, *parameters: Any) -> Any:
        """The first column of the first row; `None` without a row."""
        rows = self._rows(sql, parameters)
        return rows[0][0] if rows else None

    # Facts about the index

    def fact(self, name: str) -> str | None:
        value: str | None = self._value("SELECT value FROM facts WHERE name = ?", name)
        return value

    # What a search reads

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
        return self._rows(sql, [match, *where.parameters, k]) if match else []

    @property
    def held_bytes(self) -> int:
        """What `vectors` keeps in memory."""
        held = self._vectors
        return 0 if held is None else held[1].nbytes + held[2].nbytes

    def vectors(self) -> tuple[TextNumbers, Vectors]:
        """The rows (N,), (N, D) of every text in use that has vectors. Kept in memory until the
        revision changes.
        """
        with self._lock:
            revision = self.fact("revision") or ""
            if self._vectors is None or self._vectors[0] != revision:
                dimension = int(self.fact("dimension") or 1)
                sql = (
                    f"SELECT number, vectors FROM texts WHERE vectors IS NOT NULL AND {IN_USE} "
                    "ORDER BY number"
                )
                rows = self._rows(sql)
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

    def text_numbers(self, where: Condition = EVERYTHING) -> list[int]:
        """The texts that have a passage which meets `where`, ascending."""
        sql = f"SELECT DISTINCT text_number FROM passages WHERE {where.sql} ORDER BY text_number"
        return [row[0] for row in self._rows(sql, where.parameters)]

    def first_passages(self, numbers: Sequence[int], where: Condition) -> dict[int, Passage]:
        """The first passage of each text that meets `where`; texts without one are left out. Others
        are not read.
        """
        sql = f"""{PASSAGE} WHERE place IN (SELECT min(place) FROM passages
            WHERE text_number IN (SELECT value FROM json_each(?)) AND {where.sql} GROUP BY text_number)"""
        return dict(self._passages(self._rows(sql, [as_json(numbers), *where.parameters])))

    def _passages(self, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Passage]]:
        """Text number and passage of rows of `PASSAGE`. Passages of one document share its source
        and metadata.
        """
        sql = (
            "SELECT id, source, metadata FROM documents WHERE id IN (SELECT value FROM "
            "json_each(?))"
        )
        documents = self._rows(sql, (as_json(list({row[2] for row in rows})),))
        shared = {name: (source, json.loads(metadata)) for name, source, metadata in documents}
        for number, passage_id, document_id, text, start, end, page, section in rows:
            source, metadata = shared[document_id]
            place = ((start, end), source, with_place(metadata, page, section), page, section)
            yield number, Passage(passage_id, document_id, text, *place)

    def positions(self, document_ids: Iterable[str]) -> dict[str, int]:
        """A number for each document that is higher for later ones; unknown ids are left out."""
        sql = "SELECT id, rowid FROM documents WHERE id IN (SELECT value FROM json_each(?))"
        return dict(self._rows(sql, (as_json(list(document_ids)),)))


def as_json(value: Any) -> str:
    """A value as it is stored and given to SQLite. Raises `ValueError` for numbers without JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
