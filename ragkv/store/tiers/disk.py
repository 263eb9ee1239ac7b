"""The disk tier: one safetensors file an entry, with one writing process and any number of reading
processes.

A put takes these steps: evict, write and sync the bytes under a temporary name, rename, sync the
directory, add the entry to the ledger and the index. A kill between two steps leaves either nothing
visible or a complete entry. The capacity counts the bytes of the files; the index comes on top
(about 200 bytes an entry).

The identity is checked when a file is opened, and a checksum with every layer that is read. A file
that is unlinked meanwhile stays readable until its lease is closed. `read_only.py` is the tier of
the processes that only read.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ragkv.errors import EntryDamagedError, StoreError

from ..entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from ..index import DiskIndex, Row
from ..policies import Item, Policy, TurnSize
from ..record import OtherVersionError, read_info
from ..record_writing import Record
from .directory import EntryDirectory
from .lease import Lease, TierKind, entry_file, open_lease
from .ledger import LocalTier, Slot

log = logging.getLogger(__name__)

SMALL_BYTES = 16 << 20  # Fewer bytes of entries give way as a whole.


class DiskTier(LocalTier[None]):
    """Entries on disk, written by this process alone."""

    kind = TierKind.DISK

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        policy: Policy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open `directory`, making it if needed.

        Raises `StoreLockedError` if another process writes there, `StoreError` if it cannot be
        written.
        """
        super().__init__(capacity_bytes, policy, clock)
        self._capacity_bytes = capacity_bytes  # of which others may take some
        # one put at a time: no other put uses the space made for it
        self._write_lock = threading.Lock()
        self._write_failed = False
        self._closed = False
        self._directory = EntryDirectory(directory)
        self._directory.open_for_writing()
        try:
            self._index = DiskIndex(self._directory.index)
            self._adopt_files()
        except OSError as error:
            self._directory.release()
            raise StoreError(
                f"Cannot read the store directory {directory}: {error}. Check the disk."
            ) from error

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        with self._lock:
            slot = self._ledger.get(key)
            if slot is None or self._closed:
                self._counts.misses += 1
                return None
            self._ledger.pin(slot)
        lease = self._open(slot, identity, token_ids)
        with self._lock:
            if lease is None:
                self._ledger.unpin(slot)
                self._counts.misses += 1
                return None
            now = self._clock()
            self._counts.hits += 1
            if self._ledger.get(key) is slot:
                self._ledger.used(slot, now)
                self._index.record(key, _row(slot.item, now))
        return lease

    def put(self, entry: Entry | EncodedEntry) -> bool:
        key = entry.info.key
        with self._write_lock:
            if self.contains(key):
                return True
            encoded = EncodedEntry.of(entry)
            if encoded.size_bytes > self._ledger.capacity_bytes:
                return False
            record = Record.of(encoded)
            item = Item(key, record.file_bytes, entry.info.group, entry.info.index)
            with self._lock:
                if self._closed or not self._ledger.make_space(item, self._clock()):
                    return False
            return self._write(item, record)

    def leave(self, size_bytes: int) -> None:
        """Leave so much of the capacity to what is stored elsewhere, and evict what has no room any
        more.
        """
        with self._write_lock, self._lock:
            self._ledger.resize(max(0, self._capacity_bytes - size_bytes), self._clock())

    def give_way(self) -> int:
        """Evict half of the entries, because the disk is full; returns the bytes that this freed."""
        with self._write_lock, self._lock:
            before = self._ledger.used_bytes
            capacity_bytes = self._ledger.capacity_bytes
            self._ledger.resize(before // 2 if before > SMALL_BYTES else 0, self._clock())
            self._ledger.capacity_bytes = capacity_bytes
            return before - self._ledger.used_bytes

    def served(self, turn: TurnSize) -> None:
        with self._write_lock:  # not between making space and writing
            super().served(turn)

    def delete(self, key: EntryKey) -> bool:
        """See `Tier.delete`; a power cut does not undo it. Raises `StoreError` if the file cannot
        be removed.
        """
        with self._lock:
            if key not in self._ledger:
                return False
            try:
                self._directory.remove(key, durably=True)
            except OSError as error:
                raise StoreError(
                    f"Entry {key} could not be deleted from disk: {error}. It is still there."
                ) from error
            self._ledger.remove(key)
            self._index.record(key, None)
        return True

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        with self._lock:
            slots = list(self._ledger)
        for slot in slots:
            key = slot.item.key
            info = None
            try:
                info = read_info(entry_file(self._directory.root, key), key)
            except OtherVersionError:
                pass
            except EntryDamagedError as error:
                self._drop(slot, error)
            except OSError as error:
                log.warning("Entry %s cannot be read: %s", key, error)
            yield key, info

    def close(self) -> None:
        with self._write_lock, self._lock:  # after a running put
            if self._closed:
                return
            self._closed = True
        self._index.close()
        self._directory.release()

    def _adopt_files(self) -> None:
        """Add the files on disk to the ledger, least recently used first; drop those that cannot be
        entries.
        """
        files = dict(self._directory.scan())
        rows = self._index.rows
        for key in rows.keys() - files.keys():
            self._index.record(key, None)
        adopted = [
            (rows.get(key) or self._orphan(key, size), key, size) for key, size in files.items()
        ]
        found = [
            (row, Item(key, size, row.group, row.index))
            for row, key, size in adopted
            if row is not None
        ]
        for row, item in sorted(found, key=lambda pair: pair[0].used):
            if self._ledger.make_space(item, row.used):
                self._ledger.add(item, None, row.used)
            else:
                # larger than the whole capacity, which may be a smaller setting now
                self._unlink(item.key)

    def _orphan(self, key: EntryKey, size: int) -> Row | None:
        """A row for a file that the index does not know; `None` if the file is no entry and was
        removed.
        """
        path = entry_file(self._directory.root, key)
        try:
            info = read_info(path, key)
            row = Row(size, path.stat().st_mtime, info.group, info.index)
        except OtherVersionError:
            row = Row(size, 0.0)  # it takes space, is evicted first, and `gc` removes it
        except (EntryDamagedError, OSError) as error:
            log.warning("An orphan in the store was removed: %s", error)
            self._counts.damaged += 1
            self._unlink(key)
            return None
        self._index.record(key, row)
        return row

    def _open(self, slot: Slot[None], identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        damaged = partial(self._drop, slot)
        try:
            return open_lease(
                self._directory.root,
                identity,
                token_ids,
                on_read=self._count_read,
                on_damage=damaged,
                on_close=partial(self._unpin, slot),
            )
        except FileNotFoundError as error:
            damaged(EntryDamagedError(slot.item.key, f"its file is gone ({error})"))
            return None

    def _write(self, item: Item, record: Record) -> bool:
        try:
            self._directory.write(item.key, record.pieces())
        except OSError as error:
            if not self._write_failed:  # log it once: on a full disk every entry fails
                log.warning(
                    "Entries cannot be written to %s: %s. Going on without.",
                    self._directory.root,
                    error,
                )
            self._write_failed = True
            with self._lock:
                self._ledger.cancel(item, self._clock())
            return False
        now = self._clock()
        with self._lock:
            self._write_failed = False
            self._ledger.add(item, None, now)
            self._counts.written_bytes += item.size
            self._index.record(item.key, _row(item, now))
        return True

    def _drop(self, slot: Slot[None], why: EntryDamagedError) -> None:
        with self._lock:
            if self._ledger.get(slot.item.key) is not slot:
                return  # it was deleted, evicted or dropped meanwhile
            log.warning("%s", why)
            self._counts.damaged += 1
            self._ledger.remove(slot.item.key)
            self._unlink(slot.item.key)

    def _evict(self, slot: Slot[None]) -> None:
        super()._evict(slot)
        self._unlink(slot.item.key)

    def _unlink(self, key: EntryKey) -> None:
        """Remove the file, then its row: a file without a row is examined at the next open, so it
        is not lost.
        """
        try:
            self._directory.remove(key)
        except OSError as error:
            log.warning("Entry %s cannot be removed from disk: %s", key, error)
        self._index.record(key, None)


def _row(item: Item, now: float) -> Row:
    return Row(item.size, now, item.group, item.index)
