"""The disk tier's index: size, last use and conversation of every entry file, kept in diskcache
(SQLite).

The index makes opening fast and keeps the order of use across restarts, but it is only a hint: the
entry files decide what is stored. At open, a row without a file is dropped, a file without a row is
examined and adopted, and a broken index is deleted and rebuilt. So rows may be written late, and a
thread of the index writes them: a SQLite connection belongs to one thread, and no request may wait
for it. A row is never written before its entry is durable.

diskcache unpickles what it reads (CVE-2025-69872). `JsonDisk` refuses pickled keys and values, and
also files next to the database, because their names come out of the database.
"""

import contextlib
import json
import logging
import math
import shutil
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import diskcache
from diskcache.core import MODE_RAW

from ragkv.errors import StoreError
from ragkv.runtime import make_private_folder

from .background import Background, Job
from .key import EntryKey

log = logging.getLogger(__name__)

_LINGER_S = 0.05  # rows recorded within this time share a transaction, as those of one request do


@dataclass(frozen=True, slots=True)
class Row:
    """What the index records of one entry file."""

    size: int  # bytes of the file
    used: float  # time of the last use, seconds since the epoch
    group: str = ""  # as in `Item`
    index: int = 0

    @classmethod
    def from_json(cls, text: str) -> "Row":
        """A row from the text in the database. Raises `ValueError` or `TypeError` if it is not a
        row.
        """
        row = cls(**json.loads(text))
        if list(map(type, astuple(row))) != [int, float, str, int] or not math.isfinite(row.used):
            raise ValueError(f"{text[:100]} is no row")
        return row


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """A serializer for diskcache that stores text only: no pickle, no files next to the
    database.
    """

    def put(self, key: object) -> tuple[str, bool]:
        return _text(key), True

    def get(self, key: object, raw: object) -> str:
        if not raw:
            raise StoreError("it holds a pickled key, which is refused")
        return _text(key)

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, str]:
        return 0, MODE_RAW, None, _text(value)

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> str:
        if mode != MODE_RAW or filename is not None:
            raise StoreError(f"a value of mode {mode} is refused (4 is pickle)")
        return _text(value)

    def remove(self, file_path: str) -> None:
        """Do nothing: this class writes no files, so a file name in the database was not put there
        by it.
        """


class _Database(diskcache.Cache):  # type: ignore[misc]
    """A diskcache that closes its connection if opening fails, as on a full disk."""

    def __init__(self, directory: Path) -> None:
        try:
            super().__init__(
                str(directory),
                disk=JsonDisk,
                eviction_policy="none",  # the tier's policy decides
                cull_limit=0,
                # with mmap, a truncated database raises SIGBUS instead of an error
                sqlite_mmap_size=0,
            )
        except BaseException:
            with contextlib.suppress(AttributeError):  # it failed before there was a connection
                self.close()
            raise


class DiskIndex:
    """Rows by key, written by a background thread. All methods are thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._cache: _Database | None = None  # of the background thread; `None`: rows are not kept
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
                self._cache = _open(self._directory)
                self.rows = _load(self._cache)
                return
            # diskcache raises anything on a damaged database; the index is only a hint
            except Exception as error:
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
        if self._cache is None:
            return
        try:
            with self._cache.transact():  # not with retry=True, which loops for ever on a full disk
                for key, row in batch.items():
                    if row is None:
                        self._cache.delete(key.to_text())
                    else:
                        self._cache.set(key.to_text(), json.dumps(asdict(row)))
        except Exception as error:  # as above
            if not self._broken:  # log it once; the next open finds the entries without their rows
                log.warning(
                    "The index in %s cannot be written: %s. The order of use is lost.",
                    self._directory,
                    error,
                )
            self._broken = True

    def _close(self) -> None:
        cache = self._cache
        self._cache = None
        try:
            if cache is not None:
                cache.close()
        except sqlite3.Error as error:
            log.warning("The index did not close cleanly: %s", error)
        if self._broken:
            # rows are missing: the next open rebuilds it
            shutil.rmtree(self._directory, ignore_errors=True)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise StoreError(f"The index stores text only, not {type(value).__name__}.")
    return value


def _open(directory: Path) -> _Database:
    """The database, sound. Raises anything."""
    make_private_folder(directory)  # a rebuild may have deleted it
    file = directory / "cache.db"
    file.touch(mode=0o600)  # SQLite gives its other files the same mode
    # without the check, damage could hide rows unnoticed
    with contextlib.closing(sqlite3.connect(file)) as connection:
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise StoreError(found)
    return _Database(directory)


def _load(cache: _Database) -> dict[EntryKey, Row]:
    rows = {}
    for text in list(cache.iterkeys()):
        try:
            if (key := EntryKey.from_text(text)) is None:
                raise ValueError(f"{text[:80]!r} is no key")
            rows[key] = Row.from_json(cache.get(text))
        except (StoreError, ValueError, TypeError) as error:
            log.warning("An index row was refused: %s", error)
    return rows
