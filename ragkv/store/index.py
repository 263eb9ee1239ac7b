"""The disk tier's index: size, last use and conversation of every entry file, kept in SQLite.

The index makes opening fast and keeps the order of use across restarts, but it is only a hint: the entry files decide
what is stored. At open, a row without a file is dropped, a file without a row is examined and adopted, and a broken
index is deleted and rebuilt. So rows may be written late, and a thread of the index writes them: a SQLite connection
belongs to one thread, and no request may wait for it. A row is never written before its entry is durable.

Rows are JSON text, which is checked when it is read; nothing in the database is executed or unpickled. Earlier versions
kept the same rows with diskcache; they are taken over when the directory is opened.
"""

import json
import logging
import math
import shutil
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.runtime import make_private_folder

from .background import Background, Job
from .key import EntryKey

log = logging.getLogger(__name__)

FILE = "rows.db"
EARLIER_FILE = "cache.db"  # Versions that used diskcache kept their rows in this file.
_LINGER_S = 0.05  # Rows recorded within this time share a transaction, as those of one request do.


@dataclass(frozen=True, slots=True)
class Row:
    """What the index records of one entry file."""

    size: int  # bytes of the file
    used: float  # time of the last use, seconds since the epoch
    group: str = ""  # as in `Item`
    index: int = 0

    @classmethod
    def from_json(cls, text: object) -> "Row":
        """A row from the text in the database; raises `ValueError` or `TypeError` if it is not a row."""
        if not isinstance(text, str):
            raise TypeError(f"an index row is JSON text, not {type(text).__name__}")
        row = cls(**json.loads(text))
        if [type(value) for value in asdict(row).values()] != [int, float, str, int]:
            raise TypeError(f"an index row has wrong types: {text[:100]}")
        if not math.isfinite(row.used):
            raise ValueError(f"an index row has no time of use: {text[:100]}")
        return row


class DiskIndex:
    """Rows by key, written by a background thread. All methods are thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._connection: sqlite3.Connection | None = (
            None  # used by the background thread alone; `None`: rows are not kept
        )
        self.rows: Mapping[EntryKey, Row] = {}  # found at open, without those that cannot be read
        self._pending: dict[EntryKey, Row | None] = {}  # None: delete the row
        self._pending_lock = threading.Lock()
        self._closing = threading.Event()
        self._broken = False
        self._worker: Background[None] = Background(0, "ragkv-index")
        self._worker.submit(Job(self._open))
        self._worker.flush()

    def record(self, key: EntryKey, row: Row | None) -> None:
        """Write `row`, or delete the row of `key`, in the background. The entry file must be durable already."""
        with self._pending_lock:
            waiting = bool(self._pending)
            self._pending[key] = row
        if not waiting:
            self._worker.submit(Job(self._write))

    def close(self) -> None:
        """Write pending rows and close the database. Twice is harmless."""
        self._closing.set()
        self._worker.submit(Job(self._close))
        self._worker.close()

    def _open(self) -> None:
        for next_step in ("It is rebuilt.", "Going on without one."):
            try:
                self._connection = _database(self._directory)
                self.rows = _load(self._connection)
                return
            except (sqlite3.Error, StoreError, OSError) as error:  # the index is only a hint
                self._close()
                log.warning("The index in %s cannot be used: %s. %s", self._directory, error, next_step)
                shutil.rmtree(self._directory, ignore_errors=True)

    def _write(self) -> None:
        self._closing.wait(_LINGER_S)
        with self._pending_lock:
            batch, self._pending = self._pending, {}
        if self._connection is None:
            return
        try:
            with self._connection:  # one transaction
                for key, row in batch.items():
                    if row is None:
                        self._connection.execute("DELETE FROM rows WHERE key = ?", (key.to_text(),))
                    else:
                        values = (key.to_text(), json.dumps(asdict(row)))
                        self._connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", values)
        except sqlite3.Error as error:
            if not self._broken:  # log it once; the next open finds the entries without their rows
                log.warning("The index in %s cannot be written: %s. The order of use is lost.", self._directory, error)
            self._broken = True

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            log.warning("The index did not close cleanly: %s", error)
        if self._broken:
            shutil.rmtree(self._directory, ignore_errors=True)  # rows are missing: the next open rebuilds it


def _database(directory: Path) -> sqlite3.Connection:
    """The database, checked: without the check, damage could hide rows unnoticed."""
    make_private_folder(directory)  # a rebuild may have deleted it
    file = directory / FILE
    file.touch(mode=0o600)  # SQLite gives its other files the same mode
    connection = sqlite3.connect(file)
    try:
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreError(found)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a row that a power cut loses is made anew from its file
        with connection:
            connection.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        _take_over(connection, directory)
    except BaseException:
        connection.close()
        raise
    return connection


def _take_over(connection: sqlite3.Connection, directory: Path) -> None:
    """Copy the rows that an earlier version kept with diskcache, and delete its files. Text alone: no pickle."""
    earlier = directory / EARLIER_FILE
    if not earlier.exists():
        return
    try:
        connection.execute("ATTACH ? AS earlier", (str(earlier),))
        with connection:
            connection.execute(
                "INSERT OR IGNORE INTO rows SELECT key, value FROM earlier.Cache "
                "WHERE typeof(key) = 'text' AND typeof(value) = 'text'"
            )
        connection.execute("DETACH earlier")
    except sqlite3.Error as error:
        log.warning("The index of an earlier version in %s cannot be read: %s. It is rebuilt.", directory, error)
    for file in directory.glob(f"{EARLIER_FILE}*"):
        file.unlink()


def _load(connection: sqlite3.Connection) -> dict[EntryKey, Row]:
    rows = {}
    for text, value in connection.execute("SELECT key, value FROM rows"):
        key = EntryKey.from_text(str(text))
        try:
            if key is None:
                raise ValueError(f"{str(text)[:80]!r} is no key")
            rows[key] = Row.from_json(value)
        except (ValueError, TypeError) as error:
            log.warning("An index row was refused: %s", error)
    return rows
