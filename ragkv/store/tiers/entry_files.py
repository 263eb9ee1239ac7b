"""The files of the disk tier: their names, how they are listed, written and deleted.

    writer.lock, writer.txt   the lock of the one writing process, and who it is (`writer_lock.py`)

    tmp/                      files being written; at open, those that a killed writer left

    entries/ab/ab12...kv      complete, durable files, named by their key

    entries/ab/ab12....GROUP.INDEX.kv   a conversation's block, named by its place, too

The files alone say what is stored. Their names tell what the policy must know. Their sizes and
times of modification tell what they take, and when they were used last. There is no index that a
kill or a flipped bit could part from them. (One in SQLite, a row an entry, opened no sooner.)
"""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import filelock

from ragkv.errors import StoreError
from ragkv.runtime import make_private_folder, replace_file, sync

from .. import writer_lock
from ..entry import EntryKey
from ..policies import Item

log = logging.getLogger(__name__)

ENTRIES = "entries"  # the folder of entry files, in the tier's directory
SUFFIX = ".kv"
_NAME = re.compile(r"([0-9a-f]{64})(?:\.([\w-]+)\.(\d+))?\.kv", re.ASCII)


class EntryFile(NamedTuple):
    """A file that a listing found."""

    item: Item
    path: str  # a `Path` takes as long as all the rest of a listing
    used: float  # seconds since the epoch


def file_of(root: Path, item: Item) -> Path:
    """The file of `item` in the disk tier's directory `root`, whether it exists or not."""
    name = item.key.to_text()
    place = f".{item.group}.{item.index}" if item.group else ""
    return root / ENTRIES / name[:2] / f"{name}{place}{SUFFIX}"


def listed(root: Path) -> Iterator[EntryFile]:
    """Every entry file, in no particular order. Files may vanish meanwhile; others are passed."""
    for shard in _names(root / ENTRIES):
        for file in _names(Path(shard.path)):
            found = _NAME.fullmatch(file.name)
            if found is not None and file.name[:2] == shard.name:
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat()
                    key, group, index = found.groups()
                    item = Item(EntryKey(key), stat.st_size, group or "", int(index or 0))
                    yield EntryFile(item, file.path, stat.st_mtime)


class WritableFiles:
    """The entry files of a directory that this process alone writes. All methods are thread-safe."""

    def __init__(self, root: Path) -> None:
        """Make the directory, hold its lock, and remove what is of no use any more.

        Raises `StoreLockedError` if another process has the lock, and `StoreError`.
        """
        self.root = root
        self._drafts = root / "tmp"
        # folders with deletions that the disk has not confirmed
        self._unsynced: set[Path] = set()
        self._guard = threading.Lock()  # of `_unsynced`
        self._syncing = threading.Lock()
        self._writer = _locked(root, self._drafts)

    def by_use(self) -> list[EntryFile]:
        """All files, the longest unused first. Raises `StoreError`."""
        try:
            return sorted(listed(self.root), key=lambda file: file.used)
        except OSError as error:
            raise StoreError(
                f"Cannot read the store directory {self.root}: {error}. Check the disk."
            ) from error

    def write(self, item: Item, *pieces: bytes | memoryview) -> Path:
        """Write the file of `item`, durably: a kill leaves nothing visible or a whole file. Raises
        `OSError`.
        """
        path = file_of(self.root, item)
        if not path.parent.is_dir():
            make_private_folder(path.parent)
            sync(path.parent.parent)
        replace_file(path, *pieces, drafts=self._drafts)
        return path

    def remove(self, path: str, key: EntryKey) -> None:
        """Remove the file of an entry that is deleted; `confirm_removals` must follow. Raises
        `StoreError`.
        """
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"Entry {key} could not be deleted from disk: {error}. It is still there; "
                "`ragkv gc` deletes what no document has."
            ) from error
        with self._guard:
            self._unsynced.add(Path(path).parent)

    def confirm_removals(self, key: EntryKey) -> None:
        """Return when the disk has all removals so far, that of `key` too. Raises `StoreError` if it
        does not confirm them; the next call asks again.
        """
        with self._syncing:
            with self._guard:
                folders = self._unsynced
                self._unsynced = set()
            try:
                for folder in folders:
                    sync(folder)
            except OSError as error:
                with self._guard:
                    self._unsynced |= folders
                raise StoreError(
                    f"Entry {key} was deleted, but the disk did not confirm it: {error}. After a "
                    "power cut it may be there again. Delete it once more when the disk is well."
                ) from error

    def close(self) -> None:
        """Give the directory's lock back. Twice is harmless."""
        self._writer.release()


def discard(path: str) -> None:
    """Remove the file of an entry that was evicted or is damaged. A power cut may undo it."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("The entry in %s cannot be removed from disk: %s", path, error)


def _locked(root: Path, drafts: Path) -> filelock.BaseFileLock:
    """The writer's lock, held; the folders are made, and emptied of drafts."""
    lock = None
    try:
        make_private_folder(root)
        for folder in (root / ENTRIES, drafts):
            make_private_folder(folder)
            # it may have existed with another mode; the root may hold other people's files
            folder.chmod(0o700)
        lock = writer_lock.acquire(root)
        for orphan in drafts.iterdir():
            orphan.unlink(missing_ok=True)
    except OSError as error:
        if lock is not None:
            lock.release()
        raise StoreError(
            f"Cannot write to the store directory {root}: {error.strerror or error}. Choose "
            "another directory, or open this one with read_only=True."
        ) from error
    return lock


def _names(folder: Path) -> list[os.DirEntry[str]]:
    """The contents of `folder`; empty if it vanished or is not a directory."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
