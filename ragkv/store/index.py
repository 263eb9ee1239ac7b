"""The disk tier's index: size, last use and conversation of every entry file, in SQLite.

The index makes opening fast and keeps the order of use across restarts, but it is only a hint: the
entry files decide what is stored. At open, a row without a file is dropped, a file without a row is
examined and adopted, and a broken index is deleted and rebuilt. So rows may be written late, and a
thread of the index writes them: a SQLite connection belongs to one thread, and no request may wait
for it. A row is never written before its entry is durable.
"""

import logging
import math
import shutil
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.runtime import create_private

from .background import Background, Job
from .entry import EntryKey

log = logging.getLogger(__name__)

FILE = "rows.db"
# Without a rowid the key is the table, and not a second index beside it. "member" is `Row.index`.
TABLE = """CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY NOT NULL,
    size INTEGER NOT NULL,
    used REAL NOT NULL,
    conversation TEXT NOT NULL,
    member INTEGER NOT NULL
) WITHOUT ROWID"""
_LINGER_S = 0.05  # rows recorded within this time share a transaction, as those of one request do


@dataclass(frozen=True, slots=True)
class Row:
    """What the index records of one entry file."""

    size: int  # bytes of the file
    used: float  # time of the last use, seconds since the epoch
    group: str = ""  # as in `Item`
    index: int = 0

    @classmethod
    def of(cls, values: Sequence[object]) -> "Row":
        """A row from the columns of the database. Raises `ValueError` or `TypeError` if it is none:
        SQLite stores any value in any column.
        """
        row = cls(*values)  # type: ignore[arg-type]
        if list(map(type, values)) != [int, float, str, int] or not math.isfinite(row.used):
            raise ValueError(f"{values!r:.100} is no row")
        return row


class DiskIndex:
    """Rows by key, written by a background thread. All methods are thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._database: sqlite3.Connection | None = (
            None  # of the background thread; `None`: none is kept
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
        """Write `row`, or delete the row of `key`, in the background. The entry file must be
        durable already.
        """
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
                self._database = _open(self._directory)
                self.rows = _load(self._database)
                return
            except (sqlite3.Error, OSError, StoreError) as error:
                self._close()
                log.warning(
                    "The index in %s cannot be used: %s. %s", self._directory, error, next_step
                )
                shutil.rmtree(self._directory, ignore_errors=True)

    def _write(self) -> None:
        self._closing.wait(_LINGER_S)
        with self._pending_lock:
            batch = self._pending
            self._pending = {}
        if self._database is None:
            return
        gone = [(key.to_text(),) for key, row in batch.items() if row is None]
        kept = [(key.to_text(), *astuple(row)) for key, row in batch.items() if row is not None]
        try:
            with self._database:
                self._database.executemany("DELETE FROM entries WHERE key = ?", gone)
                self._database.executemany("REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", kept)
        except sqlite3.Error as error:
            if not self._broken:  # log it once; the next open finds the entries without their rows
                log.warning(
                    "The index in %s cannot be written: %s. The order of use is lost.",
                    self._directory,
                    error,
                )
            self._broken = True

    def _close(self) -> None:
        database = self._database
        self._database = None
        try:
            if database is not None:
                database.close()
        except sqlite3.Error as error:
            log.warning("The index did not close cleanly: %s", error)
        if self._broken:
            # rows are missing: the next open rebuilds it
            shutil.rmtree(self._directory, ignore_errors=True)


def _open(directory: Path) -> sqlite3.Connection:
    """The database, sound. Raises `sqlite3.Error`, `OSError`, and `StoreError` for damage."""
    file = directory / FILE
    if not file.exists():
        shutil.rmtree(directory, ignore_errors=True)  # it may hold the index of an earlier version
    create_private(file)  # SQLite gives its other files the same mode
    database = sqlite3.connect(file)
    try:
        # without the check, damage could hide rows unnoticed
        found = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreError(found)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose rows, not the file
        database.execute(TABLE)
    except BaseException:  # as on a full disk
        database.close()
        raise
    return database


def _load(database: sqlite3.Connection) -> dict[EntryKey, Row]:
    rows = {}
    for text, *values in database.execute("SELECT * FROM entries"):
        try:
            if (key := EntryKey.from_text(text)) is None:
                raise ValueError(f"{text[:80]!r} is no key")
            rows[key] = Row.of(values)
        except (ValueError, TypeError) as error:
            log.warning("An index row was refused: %s", error)
    return rows
