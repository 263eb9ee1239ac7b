"""The files of the disk tier: their names, how they are listed, written, evicted and deleted.

    writer.lock, writer.txt             the lock of the one writing process, and who it is
    tmp/                                files being written; at open, those of a killed writer
    entries/ab/ab12...kv                complete, durable files, named by their key
    entries/ab/ab12....GROUP.INDEX.kv   a conversation's block, named by its place, too

The files alone say what is stored. A name has what the policy must know. The size and the time of
modification say how much room a file takes and when it was used last. There is no index that could
disagree with the files after a kill or a flipped bit. (With an index in SQLite, one row an entry,
the tier opened no faster.)

A put takes these steps: evict, write and sync the bytes under a temporary name, rename, sync the
directory, add the entry to the ledger. A kill between two steps leaves either nothing visible or a
complete entry. A deletion syncs the directory too.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import filelock

from ragkv.errors import StoreError
from ragkv.runtime import make_private_folder, replace_file, sync

from .. import writer_lock
from ..entry import EntryKey, StoredEntry
from ..policies import Item, Policy
from ..record import record_of
from .ledger import Ledger

log = logging.getLogger(__name__)

SMALL_BYTES = 16 << 20  # Fewer bytes of entries give way as a whole.
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


class EntryFiles:
    """The files of a disk tier, which this process alone writes, and their ledger."""

    def __init__(self, root: Path, capacity_bytes: int, policy: Policy) -> None:
        """See `DiskTier`."""
        self.ledger: Ledger[str] = Ledger(capacity_bytes, policy, delete_file)  # of paths
        self._root = root
        self._drafts = root / "tmp"
        self._capacity_bytes = capacity_bytes  # of which others may take some
        # one put at a time: nothing else uses the room that was made for it
        self._writing = threading.Lock()
        self._write_failed = False
        self._unsynced: set[Path] = set()  # folders with deletions that the disk has not confirmed
        self._guard = threading.Lock()  # of `_unsynced`
        self._syncing = threading.Lock()
        self._writer = _locked(root, self._drafts)
        try:
            files = sorted(listed(root), key=lambda file: file.used)
        except OSError as error:
            self._writer.release()
            raise StoreError(
                f"Cannot read the store directory {root}: {error}. Check the disk."
            ) from error
        for file in files:
            # a copied directory may have two files of an entry; the capacity may be smaller now
            if file.item.key in self.ledger or not self.ledger.make_room(file.item, file.used):
                delete_file(file.path)
            else:
                self.ledger.add(file.item, file.path, file.used)

    def put(self, entry: StoredEntry) -> bool:
        """See `Tier.put`."""
        key = entry.info.key
        with self._writing:
            if key in self.ledger:
                return True
            if entry.size_bytes > self.ledger.capacity_bytes:
                return False
            head, layers = record_of(entry)
            size = len(head) + entry.size_bytes
            item = Item(key, size, entry.info.group, entry.info.index)
            return self.ledger.make_room(item) and self._write(item, head, *layers)

    def delete(self, key: EntryKey) -> bool:
        """See `DiskTier.delete`."""
        with self.ledger.lock:  # no put writes the file anew between the two
            slot = self.ledger.get(key)
            if slot is not None:
                path = Path(slot.payload)
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise StoreError(
                        f"Entry {key} could not be deleted from disk: {error}. It is still there; "
                        "`ragkv gc` deletes what no document has."
                    ) from error
                self.ledger.remove(key)
                with self._guard:
                    self._unsynced.add(path.parent)
        self._sync_deletions(key)
        return slot is not None

    def reserve(self, size_bytes: int) -> None:
        """See `Tier.reserve`; what has no room any more is evicted."""
        with self._writing:
            self.ledger.resize(max(0, self._capacity_bytes - size_bytes))

    def free_disk(self) -> int:
        """See `Tier.free_disk`: half of the entries, or all if they are small."""
        with self._writing:
            before = self.ledger.used_bytes
            capacity_bytes = self.ledger.capacity_bytes
            self.ledger.resize(before // 2 if before > SMALL_BYTES else 0)
            self.ledger.resize(capacity_bytes)
            return before - self.ledger.used_bytes

    def close(self) -> None:
        """Give the directory back, after a running put."""
        with self._writing:
            self.ledger.close()
            self._writer.release()

    def _write(self, item: Item, *pieces: bytes | memoryview) -> bool:
        path = file_of(self._root, item)
        try:
            if not path.parent.is_dir():
                make_private_folder(path.parent)
                sync(path.parent.parent)
            replace_file(path, *pieces, drafts=self._drafts)
        except OSError as error:
            self.ledger.cancel(item)
            if not self._write_failed:  # log it once: on a full disk every entry fails
                log.warning(
                    "Entries cannot be written to %s: %s. Going on without.", self._root, error
                )
            self._write_failed = True
            return False
        self._write_failed = False
        now = time.time()
        with contextlib.suppress(OSError):  # files of one tick of the system have an order, too
            os.utime(path, (now, now))
        with self.ledger.lock:
            self.ledger.add(item, str(path))
            self.ledger.counts.written_bytes += item.size
        return True

    def _sync_deletions(self, key: EntryKey) -> None:
        """Return when the disk has all deletions so far. Look-ups and admissions do not wait for
        it: they need the ledger's lock alone.
        """
        with self._syncing:
            with self._guard:  # what is deleted from here on is synced by who deletes it
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


def delete_file(path: str) -> None:
    """Delete the file of an entry that was evicted or is damaged. A power cut may undo it."""
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
