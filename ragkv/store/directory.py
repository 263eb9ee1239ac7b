"""The disk tier's directory: names, modes, the writer's lock, and the one way in which a file becomes visible.

    writer.lock, writer.json    held by the one writing process; who that is
    index/                      see `index.py`
    tmp/                        files being written; whatever is here at open is an orphan
    entries/ab/ab12...safetensors   whole, durable files, named by their key

A file appears under `entries/` by a rename after its bytes were synced, so what can be seen there is whole. Reading
needs nothing but a key: a reader beside the writer opens the file or has a miss.
"""

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock

from ragkv.errors import StoreError, StoreLockedError

from .record import Bytes

_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")


class EntryDirectory:
    """Paths and files of one disk tier."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.index = self.root / "index"
        self._entries = self.root / "entries"
        self._temporary = self.root / "tmp"
        self._lock: filelock.BaseFileLock | None = None
        self._serial = 0
        self._serial_lock = threading.Lock()

    def open_for_writing(self) -> None:
        """Make the directory, take the writer's lock, sweep what a killed writer left.

        Raises `StoreLockedError` if another process writes here, `StoreError` if the place cannot be written.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._entries, self._temporary, self.index):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)  # it may have stood there with another; the root may hold more than ours
            self._take_lock()
            for orphan in self._temporary.iterdir():
                orphan.unlink()
        except OSError as error:
            self.release()
            raise StoreError(
                f"Cannot write to the store directory {self.root}: {error.strerror or error}. "
                "Choose another directory, or open this one with read_only=True."
            ) from error

    def open_for_reading(self) -> None:
        """Look whether there is anything to read; raises `StoreError` if not. Writes nothing."""
        try:
            with os.scandir(self._entries):
                pass
        except OSError as error:
            raise StoreError(
                f"There is no store to read in {self.root}: {error.strerror or error}. "
                "Check the directory, or open it once without read_only."
            ) from error

    def release(self) -> None:
        """Let the next writer in. Twice is harmless."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def path(self, key: str) -> Path:
        """Where the file of `key` is, or would be."""
        return self._entries / key[:2] / f"{key}.safetensors"

    def scan(self) -> Iterator[tuple[str, int]]:
        """Key and size in bytes of every entry file, in no particular order. Files may vanish meanwhile."""
        for shard in _listed(self._entries):
            for file in _listed(Path(shard.path)):
                match = _ENTRY_NAME.fullmatch(file.name)
                if match is not None and match[1][:2] == shard.name:
                    with contextlib.suppress(FileNotFoundError):
                        yield match[1], file.stat().st_size

    def write(self, key: str, pieces: Iterable[Bytes]) -> None:
        """Make `pieces` the file of `key`: durable first, visible then. Raises `OSError`, leaving nothing behind."""
        with self._serial_lock:
            self._serial += 1
            temporary = self._temporary / f"{os.getpid()}-{self._serial}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                for piece in pieces:
                    _write_fully(fd, piece)
                os.fsync(fd)
            finally:
                os.close(fd)
            self._publish(temporary, self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def remove(self, key: str, durably: bool = False) -> None:
        """Unlink the file of `key`, if it is there; `durably` also over a power cut. Raises `OSError` if refused."""
        with contextlib.suppress(FileNotFoundError):
            self.path(key).unlink()
            if durably:
                _sync_directory(self.path(key).parent)

    def _publish(self, temporary: Path, final: Path) -> None:
        if not final.parent.is_dir():
            final.parent.mkdir(mode=0o700, exist_ok=True)
            _sync_directory(self._entries)
        temporary.replace(final)
        _sync_directory(final.parent)

    def _take_lock(self) -> None:
        lock = filelock.FileLock(self.root / "writer.lock", timeout=0, mode=0o600, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise StoreLockedError(
                f"The store directory {self.root} is written by {self._writer()} already. "
                "Stop that one, choose another directory, or open this one with read_only=True."
            ) from None
        self._lock = lock
        who = self.root / "writer.json"  # apart from the lock, which whoever tries to take it may truncate
        with contextlib.suppress(OSError):  # only for the message: a full disk must still open
            who.touch(mode=0o600)
            who.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")

    def _writer(self) -> str:
        try:
            who = json.loads((self.root / "writer.json").read_text(encoding="utf-8"))
            pid = int(who["pid"])
            return "this very process" if pid == os.getpid() else f"another process (pid {pid} on {who['host']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """What is in `folder`; nothing if it vanished or is none."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_fully(fd: int, data: Bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
