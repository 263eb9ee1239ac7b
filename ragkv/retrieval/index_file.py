"""The open file of an index: one connection behind one lock, and transactions.

`index_schema.py` makes and opens the file. All that a search reads is of one state
(`IndexFile.reading`).
"""

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ragkv.errors import StoreError, StoreReadOnlyError
from ragkv.runtime import Check, Closing, acquired, no_check, stop_of

# SQLite asks every `STEPS` of its machine whether to go on: about every millisecond.
STEPS = 2000
IN_USE = "EXISTS (SELECT 1 FROM passages WHERE text_number = number)"


class IndexFile(Closing):
    """The connection to an index, its lock, and what SQLite's errors become."""

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
            try:
                self._connection.executescript(
                    "PRAGMA secure_delete = ON; PRAGMA cache_spill = OFF;"
                )
            except BaseException:
                self._connection.close()
                raise
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
                raise _told(error, self.directory) from error

    def reading(self, check: Check = no_check) -> AbstractContextManager[None]:
        """All reads of the block see one state, whatever other processes write. What `check` raises
        ends it.
        """
        return self._whole("BEGIN", check)

    def transaction(self, check: Check = no_check) -> AbstractContextManager[None]:
        """Commits all of the block or nothing, even after a kill. Other writers wait: keep the
        block short.

        What `check` raises ends it, until it is being committed.
        """
        return self._whole("BEGIN IMMEDIATE", check)

    @contextmanager
    def _whole(self, begin: str, check: Check) -> Iterator[None]:
        with self.locked(check):
            self._connection.execute(begin)
            try:
                self._check = stop_of(check)
                try:
                    yield
                finally:
                    self._check = no_check
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
        """Closes the connection."""
        with self._lock:
            self._connection.close()

    def _must_stop(self) -> bool:
        """Whether the statement that runs must end now: SQLite asks on the thread that runs it."""
        try:
            self._check()
        except BaseException as error:
            self._stopped = error
            return True
        return False


def _told(error: sqlite3.Error, directory: Path | None) -> StoreError:
    """The error that a caller gets, of the index in `directory`."""
    why = str(error)
    if "readonly" in why:
        return StoreReadOnlyError(f"The index at {directory} cannot be written: {why}.")
    if "disk is full" in why:
        hint = "Free some space: the index is as it was before."
    elif "not a database" in why or "malformed" in why:
        hint = "The file is damaged: delete the directory and ingest again."
    else:
        hint = (
            "Check that the directory can be read and written, and that no other process locks it."
        )
    return StoreError(f"The index at {directory} failed: {why}. {hint}")


def as_json(value: Any) -> str:
    """A value as it is stored and given to SQLite. Raises `ValueError` for numbers without JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
