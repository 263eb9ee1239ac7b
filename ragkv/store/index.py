"""The disk tier's index: what is on disk, how large, and when it was last used; kept in diskcache (SQLite).

The index is a hint that makes opening fast and keeps the order of use over restarts. The truth is in the entry files:
a row without its file is dropped at open, a file without its row is looked at and adopted, a broken index is thrown
away and rebuilt. So rows may be written late (by this index's own thread, never by the caller's: a SQLite
connection belongs to one thread, and a request must not wait for it) but never early: a row is recorded after its bytes
are durable.

diskcache unpickles what it finds (CVE-2025-69872); `JsonDisk` refuses pickle for keys and for values, and files beside
the database as well, since their names come out of it.
"""

import contextlib
import json
import logging
import math
import shutil
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_RAW

from ragkv.errors import StoreError

log = logging.getLogger(__name__)

_LINGER_S = 0.05  # rows that come within this time are written together: a request's leases cost one transaction


@dataclass(frozen=True, slots=True)
class Row:
    """What the index knows of one entry file."""

    size: int  # bytes of the file
    used: float  # seconds since the epoch, of the last use
    group: str = ""  # as in `Item`
    index: int = 0

    @classmethod
    def from_json(cls, text: object) -> "Row":
        """A row out of what the database held; raises `ValueError` or `TypeError` on anything else."""
        if not isinstance(text, str):
            raise TypeError(f"an index row is JSON text, not {type(text).__name__}")
        row = cls(**json.loads(text))
        if [type(value) for value in asdict(row).values()] != [int, float, str, int]:
            raise TypeError(f"an index row has wrong types: {text[:100]}")
        if not math.isfinite(row.used):
            raise ValueError(f"an index row has no time of use: {text[:100]}")
        return row


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's serializer without pickle and without side files: strings in, strings out, all in the database."""

    def put(self, key: object) -> tuple[str, bool]:
        """A key for the database."""
        return _text(key, "key"), True

    def get(self, key: object, raw: object) -> str:
        """A key from the database."""
        if not raw:
            raise StoreError("The index holds a pickled key. It is refused; the index is rebuilt from the entry files.")
        return _text(key, "key")

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, str]:
        """A value for the database."""
        return 0, MODE_RAW, None, _text(value, "value")

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> str:
        """A value from the database."""
        if mode != MODE_RAW or filename is not None:
            raise StoreError(f"The index holds a value of mode {mode} (4 is pickle). It is refused.")
        return _text(value, "value")

    def remove(self, file_path: str) -> None:
        """There are no side files: a name found in the database is not one of ours."""


class _Database(diskcache.Cache):  # type: ignore[misc]
    """A diskcache that lets go of its connection when it cannot be opened."""

    def __init__(self, directory: Path) -> None:
        try:
            super().__init__(
                str(directory),
                disk=JsonDisk,
                eviction_policy="none",  # what goes is the tier's policy's to say
                cull_limit=0,
                sqlite_mmap_size=0,  # a truncated database must be an error, not a SIGBUS
            )
        except BaseException:
            with contextlib.suppress(AttributeError):  # it got less far than having a connection
                self.close()
            raise


class DiskIndex:
    """Rows by key, written behind by one thread. All methods are thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: dict[str, Row | None] = {}  # None: forget the row
        self._wake = threading.Condition()
        self._closing = False
        self._broken = False
        self._loaded: dict[str, Row] = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragkv-index", daemon=True)
        self._thread.start()
        self._ready.wait()

    def rows(self) -> Mapping[str, Row]:
        """The rows found at open. Rows that cannot be read are left out."""
        return self._loaded

    def record(self, key: str, row: Row) -> None:
        """Write `row`, soon. Its entry file must be durable already."""
        self._enqueue(key, row)

    def forget(self, key: str) -> None:
        """Drop the row of `key`, soon."""
        self._enqueue(key, None)

    def close(self) -> None:
        """Write what is pending and close the database. Twice is harmless."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _enqueue(self, key: str, row: Row | None) -> None:
        with self._wake:
            if not self._closing:
                self._pending[key] = row
                self._wake.notify()

    def _run(self) -> None:
        try:
            cache = self._open()
        finally:
            self._ready.set()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._closing)
                self._wake.wait_for(lambda: self._closing, timeout=_LINGER_S)
                batch, self._pending = self._pending, {}
                closing = self._closing
            if batch and cache is not None:
                self._write(cache, batch)
            if closing:
                break
        if cache is not None:
            _quietly_close(cache)
        if self._broken:
            shutil.rmtree(self._directory, ignore_errors=True)  # rows are missing in it: the next open rebuilds it

    def _open(self) -> Any | None:
        """The database, rebuilt if it is broken; `None` if there can be none (rows are then not kept)."""
        for next_step in ("It is rebuilt.", "Going on without one."):
            cache = None
            try:
                cache = _database(self._directory)
                self._loaded = _load(cache)
                return cache
            except Exception as error:  # a damaged database makes diskcache raise anything, and none of it matters
                if cache is not None:
                    _quietly_close(cache)
                log.warning("The index in %s cannot be used: %s. %s", self._directory, error, next_step)
                shutil.rmtree(self._directory, ignore_errors=True)
        return None

    def _write(self, cache: Any, batch: dict[str, Row | None]) -> None:
        try:
            with cache.transact():  # never with retry=True: it spins for ever on a full disk
                for key, row in batch.items():
                    if row is None:
                        cache.delete(key)
                    else:
                        cache.set(key, json.dumps(asdict(row)))
        except Exception as error:  # as above; the thread must live on
            if not self._broken:  # once: the entries are safe, and the next open finds them without their rows
                log.warning("The index in %s cannot be written: %s. Order of use is not kept.", self._directory, error)
            self._broken = True


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise StoreError(f"The index takes and holds text only; this {what} is a {type(value).__name__}.")
    return value


def _database(directory: Path) -> _Database:
    directory.mkdir(mode=0o700, exist_ok=True)  # again, after a rebuild threw it away
    file = directory / "cache.db"
    file.touch(mode=0o600)  # SQLite gives its side files the same mode
    with contextlib.closing(sqlite3.connect(file)) as connection:  # else damage may hide rows for ever, in silence
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise StoreError(found)
    return _Database(directory)


def _load(cache: Any) -> dict[str, Row]:
    rows = {}
    for key in list(cache.iterkeys()):
        try:
            rows[key] = Row.from_json(cache.get(key))
        except (StoreError, ValueError, TypeError) as error:
            log.warning("An index row was refused: %s", error)
    return rows


def _quietly_close(cache: Any) -> None:
    try:
        cache.close()
    except (sqlite3.Error, OSError) as error:
        log.warning("The index did not close cleanly: %s", error)
