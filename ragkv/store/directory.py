"""The disk tier's directory: file names, modes, the writer's lock, and how a file becomes visible.

    writer.lock, writer.json    the lock of the one writing process, and which process holds it
    index/                      see `index.py`
    tmp/                        files being written; files found here at open were left by a killed writer
    entries/ab/ab12...safetensors   complete, durable files, named by their key

A file is synced under `tmp/` and then renamed to `entries/`, so every visible file is complete. A reader needs only a
key: a process that reads next to the writer either opens the file or has a miss.
"""

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock

from ragkv.errors import StoreError, StoreLockedError
from ragkv.runtime import make_private_folder, replace_file, sync

from .record import Bytes

PROBE_S = 0.3  # a writer waits this long for the lock: `check_unlocked` holds it for a moment
_ENTRY_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")


class EntryDirectory:
    """Paths and files of one disk tier."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.index = self.root / "index"
        self._entries = self.root / "entries"
        self._temporary = self.root / "tmp"
        self._lock: filelock.BaseFileLock | None = None

    def open_for_writing(self) -> None:
        """Make the directory, acquire the writer's lock, remove files that a killed writer left in `tmp/`.

        Raises `StoreLockedError` if another process holds the lock, `StoreError` if the directory cannot be written.
        """
        try:
            make_private_folder(self.root)
            for folder in (self._entries, self._temporary, self.index):
                make_private_folder(folder)
                folder.chmod(0o700)  # it may have existed with another mode; the root may hold other people's files
            self._acquire_lock()
            for orphan in self._temporary.iterdir():
                orphan.unlink()
        except OSError as error:
            self.release()
            raise StoreError(
                f"Cannot write to the store directory {self.root}: {error.strerror or error}. "
                "Choose another directory, or open this one with read_only=True."
            ) from error

    def open_for_reading(self) -> None:
        """Raise `StoreError` if there is no store to read. Writes nothing."""
        try:
            with os.scandir(self._entries):
                pass
        except OSError as error:
            raise StoreError(
                f"There is no store to read in {self.root}: {error.strerror or error}. "
                "Check the directory, or open it once without read_only."
            ) from error

    def release(self) -> None:
        """Release the writer's lock. Twice is harmless."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def path(self, key: str) -> Path:
        """The path of the file of `key`, whether it exists or not."""
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
        """Write `pieces` to the file of `key`, which becomes visible after it is durable. Raises `OSError`."""
        path = self.path(key)
        if not path.parent.is_dir():
            make_private_folder(path.parent)
            sync(self._entries)
        replace_file(path, *pieces, drafts=self._temporary)

    def remove(self, key: str, durably: bool = False) -> None:
        """Unlink the file of `key`, if it exists; `durably`: a power cut does not undo it. Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError):
            self.path(key).unlink()
            if durably:
                sync(self.path(key).parent)

    def _acquire_lock(self) -> None:
        lock = _lock_of(self.root)
        try:
            lock.acquire(timeout=PROBE_S)
        except filelock.Timeout:
            raise _locked_error(self.root) from None
        self._lock = lock
        # A file of its own: a process that tries to acquire the lock may truncate the lock file.
        holder = self.root / "writer.json"
        with contextlib.suppress(OSError):  # needed for the message only: a store on a full disk must still open
            holder.touch(mode=0o600)
            known = {"pid": os.getpid(), "host": socket.gethostname(), "command": _command(), "since": time.time()}
            holder.write_text(json.dumps(known), encoding="utf-8")


def check_unlocked(root: str | Path) -> None:
    """Raise `StoreLockedError` if a process writes to the directory now; costs no more than a look."""
    root = Path(root)
    if not (root / "writer.lock").exists():
        return
    lock = _lock_of(root)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise _locked_error(root) from None
    except OSError:  # what else is wrong is said when the directory is opened
        return
    lock.release()


def _lock_of(root: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(root / "writer.lock", timeout=0, mode=0o600, thread_local=False)


def _locked_error(root: Path) -> StoreLockedError:
    holder = _lock_holder(root)
    return StoreLockedError(
        f"The store directory {root} is written by {holder} already. Wait for it or stop it, choose another directory "
        "(--home on the command line), or open this one with read_only=True, as ask, search, explain and stats do.",
        holder,
    )


def _lock_holder(root: Path) -> str:
    """The process that has the lock, as it described itself."""
    try:
        known = json.loads((root / "writer.json").read_text(encoding="utf-8"))
        pid, host, command, since = int(known["pid"]), known["host"], known.get("command"), known.get("since")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "another process"
    if pid == os.getpid():
        return "this very process"
    parts = [f"pid {pid} on {host}"]
    if isinstance(command, str):
        parts.append(command)
    if isinstance(since, float):
        parts.append(f"since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}")
    return f"another process ({', '.join(parts)})"


def _command() -> str:
    """The program of this process; of `ragkv` also the command. Other arguments may be secret."""
    program = Path(sys.argv[0] or sys.executable)
    name = program.parent.name if program.name == "__main__.py" else program.name
    return " ".join([name, *sys.argv[1:2]]) if name == "ragkv" else name


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """The contents of `folder`; empty if it vanished or is not a directory."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
