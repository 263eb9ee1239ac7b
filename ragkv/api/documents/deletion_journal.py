"""A tenant's journal of deleted KV: which entries each replica must drop, whatever happened to the one that was asked.

A deletion is noted here, durably, before the index forgets the text: a process that is killed in between leaves the
note. Every replica reads the journal, also after a restart or an outage (`deletion_follower.py`), because all of them
share the tenant's directory. Notes are keys, which are digests, and no text. The latest `KEPT` notes are kept; a
replica that missed more compares all that it has with the collections. A text that is stored again is taken out.

SQLite with a rollback journal, as the index has: one file, in its old state after a kill. It is opened for each use.
"""

import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from ragkv.errors import StoreError
from ragkv.runtime import FileState, create_private, state_of
from ragkv.store import EntryKey

FILE = "deletions.sqlite"
KEPT = 10_000  # So many notes are kept.
WAIT_S = 30.0  # A change waits so long for another process that writes.

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS deletions (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, writer TEXT NOT NULL,
    at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS deletions_key ON deletions (key);
"""


class Position(NamedTuple):
    """How far a replica has read a journal."""

    journal: str = ""  # its id: a home that was replaced has another one
    number: int = 0  # of the last note that was read


class Note(NamedTuple):
    """One entry to be dropped."""

    number: int
    key: EntryKey
    is_own: bool  # written by this process


class Notes(NamedTuple):
    """What was noted after a position."""

    notes: tuple[Note, ...]
    end: Position  # the position after them
    is_complete: bool  # False: notes between the position and these are not kept any more


class DeletionJournal:
    """The journal in one tenant's directory. Thread-safe. Raises `StoreError` if the file cannot be read or written."""

    def __init__(self, directory: Path) -> None:
        """Creates nothing before the first deletion."""
        self._path = directory / FILE
        self._writer = secrets.token_hex(8)

    def state(self) -> FileState | None:
        """A value that every change of the journal changes; `None` if there is no journal yet."""
        try:
            return state_of(self._path)
        except OSError as error:
            raise self._failed(error) from error

    def add(self, keys: Sequence[EntryKey]) -> None:
        """Note that the entries of `keys` are deleted. Returns when that is durable."""
        if not keys:
            return
        rows = [(key.to_text(), self._writer, time.time()) for key in dict.fromkeys(keys)]
        with self._transaction() as connection:
            connection.executemany("DELETE FROM deletions WHERE key = ?", [(key,) for key, _, _ in rows])
            connection.executemany("INSERT INTO deletions (key, writer, at) VALUES (?, ?, ?)", rows)
            last = _last(connection) - KEPT
            if connection.execute("DELETE FROM deletions WHERE number <= ?", (last,)).rowcount:
                connection.execute("INSERT OR REPLACE INTO facts VALUES ('dropped', ?)", (str(last),))

    def discard(self, keys: Sequence[EntryKey]) -> None:
        """Take out the notes of `keys`: their texts are stored again."""
        if keys and self.state() is not None:
            with self._transaction() as connection:
                texts = [(key.to_text(),) for key in dict.fromkeys(keys)]
                connection.executemany("DELETE FROM deletions WHERE key = ?", texts)

    def after(self, position: Position) -> Notes:
        """The notes after `position`, oldest first."""
        if self.state() is None:
            return Notes((), Position(), True)
        with self._transaction() as connection:
            journal, dropped = _facts(connection)
            end = Position(journal, _last(connection))
            is_of_this = position.journal == journal and position.number <= end.number  # else a backup was restored
            since = position.number if is_of_this else 0
            rows = connection.execute(
                "SELECT number, key, writer FROM deletions WHERE number > ? ORDER BY number", (since,)
            ).fetchall()
        known = [(number, EntryKey.from_text(text), writer == self._writer) for number, text, writer in rows]
        notes = tuple(Note(number, key, is_own) for number, key, is_own in known if key is not None)
        return Notes(notes, end, since >= dropped)

    def before(self, seconds: float) -> Position:
        """The position of the last note that is older than so many seconds."""
        if self.state() is None:
            return Position()
        with self._transaction() as connection:
            journal, dropped = _facts(connection)
            query = "SELECT MAX(number) FROM deletions WHERE at < ?"
            last = connection.execute(query, (time.time() - seconds,)).fetchone()[0]
        return Position(journal, max(last or 0, dropped))  # what was dropped is older

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            create_private(self._path)
            with closing(sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)) as connection:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("BEGIN IMMEDIATE")
                if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone() is None:
                    for statement in SCHEMA.split(";"):
                        connection.execute(statement)
                    facts = [("journal", secrets.token_hex(8)), ("dropped", "0")]
                    connection.executemany("INSERT INTO facts VALUES (?, ?)", facts)
                yield connection
                connection.execute("COMMIT")  # after an error, closing the connection rolls back
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreError:
        return StoreError(
            f"The journal of deletions {self._path} failed: {error}. Nothing was deleted. Check that the file can be "
            "read and written and that the disk has space; if the file is damaged, delete it and the KV directories."
        )


def _facts(connection: sqlite3.Connection) -> tuple[str, int]:
    """The journal's id, and the number of the last note that is not kept any more."""
    facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
    return facts["journal"], int(facts["dropped"])


def _last(connection: sqlite3.Connection) -> int:
    """The number of the last note that was ever written."""
    found = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'deletions'").fetchone()
    return int(found[0]) if found else 0
