"""The disk tier: one file an entry, one writing process, and any number of reading processes
(`read_only.py`).

The files alone say what is stored (`entry_files.py`). This module writes, evicts and deletes them.
`disk_reads.py` looks entries up and reads them.

A put takes these steps: evict, write and sync the bytes under a temporary name, rename, sync the
directory, add the entry to the ledger. A kill between two steps leaves either nothing visible or a
complete entry. A deletion syncs the directory too.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ragkv.errors import EntryDamagedError, StoreError
from ragkv.runtime import make_private_folder, replace_file, sync

from ..entry import EncodedEntry, Entry, EntryInfo, EntryKey
from ..policies import LRU, Item, Policy, TurnSize
from ..record import OtherVersionError, read_info, record_of
from .base import UNLIMITED_BYTES
from .disk_reads import DiskReads, set_used, unlink, unread
from .entry_files import file_of, listed, open_for_writing
from .ledger import Slot

log = logging.getLogger(__name__)

SMALL_BYTES = 16 << 20  # Fewer bytes of entries give way as a whole.


class DiskTier(DiskReads):
    """Entries on disk, written by this process alone."""

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        policy: Policy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open `directory`, making it if needed. The capacity counts the bytes of the files.

        Raises `StoreLockedError` if another process writes there, `StoreError` if it cannot be
        written.
        """
        super().__init__(capacity_bytes, policy, clock)
        self._capacity_bytes = capacity_bytes  # of which others may take some
        # one put at a time: no other put uses the space made for it
        self._write_lock = threading.Lock()
        self._write_failed = False
        # folders with deletions that the disk has not confirmed; guarded by the tier's lock
        self._unsynced: set[Path] = set()
        self._syncing = threading.Lock()
        self._root = Path(directory)
        self._drafts = self._root / "tmp"
        self._writer = open_for_writing(self._root, self._drafts)
        try:
            files = sorted(listed(self._root), key=lambda file: file.used)
        except OSError as error:
            self._writer.release()
            raise StoreError(
                f"Cannot read the store directory {directory}: {error}. Check the disk."
            ) from error
        for file in files:
            is_second = file.item.key in self._ledger  # as a copied directory may have
            if not is_second and self._make_space(file.item, file.used):
                self._ledger.add(file.item, file.path, file.used)
            else:  # larger than the whole capacity, which may be a smaller setting now
                unlink(file.path)

    def put(self, entry: Entry | EncodedEntry) -> bool:
        key = entry.info.key
        with self._write_lock:
            if self.contains(key):
                return True
            encoded = EncodedEntry.of(entry)
            if encoded.size_bytes > self._ledger.capacity_bytes:
                return False
            head, layers = record_of(encoded)
            size = len(head) + encoded.size_bytes
            item = Item(key, size, entry.info.group, entry.info.index)
            with self._lock:
                if self._closed or not self._make_space(item, self._clock()):
                    return False
            return self._write(item, head, *layers)

    def served(self, turn: TurnSize) -> None:
        with self._write_lock:  # not between making space and writing
            super().served(turn)

    def leave(self, size_bytes: int) -> None:
        """See `Tier.leave`; what has no room any more is evicted."""
        with self._write_lock, self._lock:
            self._eviction.resize(max(0, self._capacity_bytes - size_bytes), self._clock())

    def give_way(self) -> int:
        """See `Tier.give_way`: half of the entries."""
        with self._write_lock, self._lock:
            before = self._ledger.used_bytes
            capacity_bytes = self._ledger.capacity_bytes
            self._eviction.resize(before // 2 if before > SMALL_BYTES else 0, self._clock())
            self._ledger.capacity_bytes = capacity_bytes
            return before - self._ledger.used_bytes

    def delete(self, key: EntryKey) -> bool:
        """See `Tier.delete`; a power cut does not undo it. Raises `StoreError` if the file cannot
        be removed, or the disk does not confirm it. Until it does, every deletion raises that.
        """
        with self._lock:
            slot = self._ledger.get(key)
            if slot is not None:
                path = Path(slot.payload)
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise StoreError(
                        f"Entry {key} could not be deleted from disk: {error}. It is still there; "
                        "`ragkv gc` deletes what no document has."
                    ) from error
                self._ledger.remove(key)
                self._unsynced.add(path.parent)
        self._sync_deletions(key)
        return slot is not None

    def _sync_deletions(self, key: EntryKey) -> None:
        """Return when the disk has all deletions so far. Look-ups and admissions do not wait for
        it: they need the other lock.
        """
        with self._syncing:
            with self._lock:  # what is deleted from here on is synced by who deletes it
                folders, self._unsynced = self._unsynced, set()
            try:
                for folder in folders:
                    sync(folder)
            except OSError as error:
                with self._lock:
                    self._unsynced |= folders
                raise StoreError(
                    f"Entry {key} was deleted, but the disk did not confirm it: {error}. After a "
                    "power cut it may be there again. Delete it once more when the disk is well."
                ) from error

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        with self._lock:
            slots = list(self._ledger)
        for slot in slots:
            key = slot.item.key
            info = None
            try:
                info = read_info(Path(slot.payload), key)
            except OtherVersionError:
                pass  # it takes space, and `gc` removes it
            except EntryDamagedError as error:
                self._drop(slot, error)
            except OSError as error:
                self._drop(slot, unread(key, "its file", error))
                continue  # it is dropped already, or `gc` must leave it
            yield key, info

    def scratch(self, folder: Path) -> "DiskTier":
        return DiskTier(folder, UNLIMITED_BYTES, LRU())

    def close(self) -> None:
        with self._write_lock, self._lock:  # after a running put
            self._closed = True
            self._writer.release()

    def _write(self, item: Item, *pieces: bytes | memoryview) -> bool:
        path = file_of(self._root, item)
        now = self._clock()
        try:
            if not path.parent.is_dir():
                make_private_folder(path.parent)
                sync(path.parent.parent)
            replace_file(path, *pieces, drafts=self._drafts)
        except OSError as error:
            if not self._write_failed:  # log it once: on a full disk every entry fails
                log.warning(
                    "Entries cannot be written to %s: %s. Going on without.", self._root, error
                )
            self._write_failed = True
            with self._lock:
                self._ledger.cancel(item, now)
            return False
        set_used(path, now)
        with self._lock:
            self._write_failed = False
            self._ledger.add(item, str(path), now)
            self._counts.written_bytes += item.size
        return True

    def _evict(self, slot: Slot[str]) -> None:
        super()._evict(slot)
        unlink(slot.payload)
