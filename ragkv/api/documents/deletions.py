"""A tenant's journal of deleted KV. It lists the entries that each replica must delete, even if the
replica that was asked has failed.

A deletion is noted here, durably, before the text leaves the index. So a process that is killed in
between leaves the note. Every replica reads the journal, also after a restart or an outage
(`DeletionFollower`), because all of them share the tenant's directory. Notes are keys, which are
digests, and no text. The latest `KEPT` notes are kept. A replica that missed more compares all its
entries with the collections. If a text is stored again, its note is removed.

SQLite with a rollback journal, as the index has: one file, in its old state after a kill. It is
opened for each use.
"""

import json
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from ragkv.engine import Engine
from ragkv.errors import QueueFullError, RagKVError, StoreError
from ragkv.runtime import (
    Closing,
    FileState,
    begun,
    create_private,
    read_own,
    replace_file,
    state_of,
)
from ragkv.store.entry import EntryKey

log = logging.getLogger(__name__)

FILE = "deletions.sqlite"
FOLLOWED = "deletions-followed.json"  # in the KV directory of each replica
POLL_S = 2.0
KEPT = 10_000  # the most notes
WAIT_S = 30.0  # that a change waits for another process that writes

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

    def within(self, end: "Position") -> int:
        """The number of the last note that was read of the journal that ends at `end`: 0 if it is
        another one, or a backup was restored.
        """
        return self.number if self.journal == end.journal and self.number <= end.number else 0


class Note(NamedTuple):
    """One entry to be deleted."""

    number: int
    key: EntryKey
    is_own: bool  # written by this process


class Notes(NamedTuple):
    """What was noted after a position."""

    notes: tuple[Note, ...]
    end: Position  # the position after them
    is_complete: bool  # False: notes between the position and these are not kept any more


class DeletionJournal:
    """The journal in one tenant's directory. Raises `StoreError` if the file cannot be read or
    written.
    """

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
            connection.executemany(
                "DELETE FROM deletions WHERE key = ?", [(key,) for key, _, _ in rows]
            )
            connection.executemany("INSERT INTO deletions (key, writer, at) VALUES (?, ?, ?)", rows)
            last = _last(connection) - KEPT
            if connection.execute("DELETE FROM deletions WHERE number <= ?", (last,)).rowcount:
                connection.execute(
                    "INSERT OR REPLACE INTO facts VALUES ('dropped', ?)", (str(last),)
                )

    def remove(self, keys: Sequence[EntryKey]) -> None:
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
            since = position.within(end)
            rows = connection.execute(
                "SELECT number, key, writer FROM deletions WHERE number > ? ORDER BY number",
                (since,),
            ).fetchall()
        notes = tuple(
            Note(number, key, writer == self._writer)
            for number, text, writer in rows
            if (key := EntryKey.from_text(text)) is not None
        )
        return Notes(notes, end, since >= dropped)

    def start(self) -> Position:
        """The position before the notes that are kept."""
        if self.state() is None:
            return Position()
        with self._transaction() as connection:
            return Position(*_facts(connection))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            create_private(self._path)
            with closing(
                sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)
            ) as connection:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("BEGIN IMMEDIATE")
                tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
                if ("facts",) not in tables:
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
            f"The journal of deletions {self._path} failed: {error}. Nothing was deleted. Check "
            "that the file can be "
            "read and written and that the disk has space; if the file is damaged, delete it and "
            "the KV directories."
        )


class DeletionFollower(Closing):
    """Keeps one engine's store true to the journal of its tenant, which it reads every `POLL_S`.

    A note is applied when it is first seen, and again at the next look. A request that retrieved
    the text just before its deletion may have stored its KV in between. The position is stored in
    the KV directory after the work is done. After a kill, work may repeat but is never skipped.
    While shared storage is away, the entries are deleted on this machine, and the position stays
    until they are deleted there too.
    """

    def __init__(
        self,
        journal: DeletionJournal,
        engine: Engine,
        directory: Path,
        texts: Callable[[], Iterable[str]],
        delete_traces: Callable[[], None],
        tidy: Callable[[], None],
    ) -> None:
        """`directory` is this replica's KV directory. `texts` are the passages of all collections.

        `delete_traces` deletes what requests left of deleted texts, `tidy` finishes
        other deletions.
        """
        self._journal = journal
        self._engine = engine
        self._path = directory / FOLLOWED
        self._texts = texts
        self._delete_traces = delete_traces
        self._tidy = tidy
        # everything up to here was applied twice; None: not read yet
        self._settled: Position | None = None
        self._seen = Position()  # everything up to here was applied once
        self._traced = Position()  # of the last deletion for which traces of requests were deleted
        self._state: object = None  # of the journal when nothing was left to be done
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Follow on a thread of its own until `close`. Raises `QueueFullError` if the system has no
        thread to give: a replica that follows no deletions must not answer.
        """
        self._thread = begun(self._run, "ragkv-deletions", "its tenant stays closed")
        if self._thread is None:
            raise QueueFullError("The server has no thread to give for this. Ask again.")

    def follow(self) -> None:
        """Apply what is new, and once more what was new the last time."""
        self._tidy()  # without texts nothing is noted
        state = self._journal.state()
        if self._settled is not None and state == self._state:
            return
        if self._settled is None:
            self._settled = self._seen = self._read()
        found = self._journal.after(self._settled)
        if not self._apply(found) or self._engine.stats().away:
            return
        if self._seen == found.end:  # applied for the second time
            self._state = state
        settled = self._seen
        self._seen = found.end
        if settled != self._settled:
            self._settled = settled
            self._write(settled)

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _apply(self, found: Notes) -> bool:
        """Delete what is noted; `False` if this was interrupted."""
        if not found.is_complete:
            log.warning(
                "More was deleted than is noted: all entries are compared with the collections."
            )
            self._delete_traces()
            chunks = [self._engine.chunk(text) for text in self._texts() if not self._stop.is_set()]
            if self._stop.is_set():  # the list is not whole
                return False
            self._engine.entries.retain(chunks)
            return True
        seen = self._seen.within(found.end)
        told = [note.number for note in found.notes if note.number > seen and not note.is_own]
        if told and (found.end.journal, told[-1]) != self._traced:
            self._delete_traces()
            self._traced = Position(found.end.journal, told[-1])
        # What this process deletes itself it deletes at once; the second time tells whether it came
        # to that.
        keys = [note.key for note in found.notes if note.number <= seen or not note.is_own]
        return self._engine.entries.delete_untold(list(dict.fromkeys(keys)), self._stop.is_set)

    def _read(self) -> Position:
        """How far this replica is. One whose file is damaged follows all notes again."""
        found = read_own(self._path, lambda one: Position(str(one["journal"]), int(one["number"])))
        if found is not None:
            return found
        # A replica without entries lacks nothing of what is not kept; what is kept may be of a
        # killed replica.
        return Position() if self._engine.parts.store.contents.sample(1) else self._journal.start()

    def _write(self, position: Position) -> None:
        try:
            replace_file(self._path, json.dumps(position._asdict()).encode())
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): a restart follows more deletions again.",
                self._path,
                error,
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.follow()
            except RagKVError as error:
                log.warning("Deletions were not followed (%s); trying again.", error)
            except Exception:  # the thread must live on
                log.exception("Deletions were not followed; trying again.")
            self._stop.wait(POLL_S)


def _facts(connection: sqlite3.Connection) -> tuple[str, int]:
    """The journal's id, and the number of the last note that is not kept any more."""
    facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
    return facts["journal"], int(facts["dropped"])


def _last(connection: sqlite3.Connection) -> int:
    """The number of the last note that was ever written."""
    found = connection.execute(
        "SELECT seq FROM sqlite_sequence WHERE name = 'deletions'"
    ).fetchone()
    return int(found[0]) if found else 0
