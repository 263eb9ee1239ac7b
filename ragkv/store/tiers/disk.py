"""The disk tier: one safetensors file an entry, bounded, of one writing process.

The order of a put is the order of safety: room is made, bytes are written and synced apart, renamed into place, the
directory synced, and only then is the entry entered in the books and the index. A kill between any two steps leaves
either nothing to see or a whole entry. What is counted against the capacity is the files' bytes; the index comes on top
(about 200 bytes an entry).
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

from ragkv.errors import EntryDamagedError, StoreError

from ..directory import EntryDirectory
from ..encoded import EncodedEntry
from ..entry import Entry, EntryInfo, Identity
from ..index import DiskIndex, Row
from ..policies import Item, Policy, Turn
from ..record import OtherVersionError, Record, read_head
from .base import Lease, Tier, TierKind, TierStats
from .disk_lease import open_lease
from .ledger import Counts, Ledger, Slot

log = logging.getLogger(__name__)


class DiskTier(Tier):
    """Entries on disk, written by this process alone."""

    kind = TierKind.DISK

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        policy: Policy,
        direct: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open `directory`, making it if needed. `direct` reads past the page cache where buffers are aligned.

        Raises `StoreLockedError` if another process writes there, `StoreError` if it cannot be written.
        """
        self._ledger: Ledger[None] = Ledger(capacity_bytes, policy)
        self._counts = Counts()
        self._direct = direct
        self._clock = clock
        self._lock = threading.RLock()  # the books; re-entrant, as an abandoned lease may be collected under it
        self._write_lock = threading.Lock()  # one put at a time: room made for one is not taken by another
        self._write_failed = False
        self._closed = False
        self._directory = EntryDirectory(directory)
        self._directory.open_for_writing()
        try:
            self._index = DiskIndex(self._directory.index)
            self._adopt()
        except OSError as error:
            self._directory.release()
            raise StoreError(f"Cannot read the store directory {directory}: {error}. Check the disk.") from error

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        with self._lock:
            slot = self._ledger.get(key)
            if slot is None or self._closed:
                self._counts.misses += 1
                return None
            self._ledger.pin(slot)
        lease = self._open(key, slot, identity, token_ids)
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

    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
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
                if self._closed or not self._ledger.make_room(item, self._clock(), self._evict):
                    return False
            return self._write(item, record)

    def queued(self, groups: Sequence[str]) -> None:
        with self._lock:
            self._ledger.queued(groups)

    def left(self, places: Sequence[tuple[str, int]]) -> None:
        with self._lock:
            self._ledger.left(places)

    def served(self, turn: Turn) -> None:
        with self._write_lock, self._lock:  # not while room that was made waits for its bytes
            self._ledger.served(turn, self._clock(), self._evict)

    def contains(self, key: str) -> bool:
        with self._lock:
            return key in self._ledger

    def delete(self, key: str) -> bool:
        """See `Tier.delete`; durable over a power cut. Raises `StoreError` if the file cannot be removed."""
        with self._lock:
            if key not in self._ledger:
                return False
            try:
                self._directory.remove(key, durably=True)
            except OSError as error:
                raise StoreError(
                    f"Entry {key[:12]} could not be deleted from disk: {error}. It is still there."
                ) from error
            self._ledger.remove(key)
            self._index.forget(key)
        return True

    def infos(self) -> Iterator[EntryInfo]:
        for slot in self._slots():
            info = self._info(slot)
            if info is not None:
                yield info

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        before = self.stats().used_bytes
        for slot in self._slots():
            info = self._info(slot)
            if info is None or not keep(info.identity):
                self.delete(slot.item.key)
        return before - self.stats().used_bytes

    def stats(self) -> TierStats:
        with self._lock:
            return self._ledger.stats(self.kind, self._counts)

    def close(self) -> None:
        with self._write_lock, self._lock:  # after the put under way
            if self._closed:
                return
            self._closed = True
        self._index.close()
        self._directory.release()

    def _adopt(self) -> None:
        """Enter what is on disk in the books, least recently used first; drop what cannot be an entry."""
        files = dict(self._directory.scan())
        rows = self._index.rows()
        for key in rows.keys() - files.keys():
            self._index.forget(key)
        adopted = [(rows.get(key) or self._orphan(key, size), key, size) for key, size in files.items()]
        found = [(row, Item(key, size, row.group, row.index)) for row, key, size in adopted if row is not None]
        for row, item in sorted(found, key=lambda pair: pair[0].used):
            if self._ledger.make_room(item, row.used, self._evict):
                self._ledger.add(item, None, row.used)
            else:
                self._unlink(item.key)  # larger than the whole capacity, which is a setting and may have shrunk

    def _orphan(self, key: str, size: int) -> Row | None:
        """The row of a file the index does not know, or `None` if the file was no entry and is gone."""
        try:
            info = self._read_info(key)
        except OtherVersionError:
            row = Row(size, 0.0)  # another version's; it counts, goes first, and `gc` sweeps it
        except (EntryDamagedError, OSError) as error:
            log.warning("An orphan in the store was removed: %s", error)
            self._counts.damaged += 1
            self._unlink(key)
            return None
        else:
            row = Row(size, self._directory.path(key).stat().st_mtime, info.group, info.index)
        self._index.record(key, row)
        return row

    def _open(self, key: str, slot: Slot[None], identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        def damaged(error: EntryDamagedError) -> None:
            self._drop(slot, error)

        def closed() -> None:
            with self._lock:
                self._ledger.unpin(slot)

        path = self._directory.path(key)
        try:
            return open_lease(path, key, identity, token_ids, self._direct, self._count_read, damaged, closed)
        except EntryDamagedError as error:
            damaged(error)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EIO):
                damaged(EntryDamagedError(key, f"its file cannot be read ({error})"))
            else:  # too many open files, say: nothing is wrong with the entry
                log.warning("Entry %s cannot be opened: %s. It counts as a miss.", key[:12], error)
        return None

    def _write(self, item: Item, record: Record) -> bool:
        try:
            self._directory.write(item.key, record.pieces())
        except OSError as error:
            if not self._write_failed:  # once: a full disk would say it for every entry
                log.warning("Entries cannot be written to %s: %s. Going on without.", self._directory.root, error)
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
                return  # deleted or evicted meanwhile, so its file is gone rightly; or dropped already
            log.warning("%s", why)
            self._counts.damaged += 1
            self._ledger.remove(slot.item.key)
            self._unlink(slot.item.key)

    def _evict(self, slot: Slot[None]) -> None:
        self._counts.evictions += 1
        self._unlink(slot.item.key)

    def _unlink(self, key: str) -> None:
        """Remove the file and its row. The row goes last: a file without a row is looked at again, not lost."""
        try:
            self._directory.remove(key)
        except OSError as error:
            log.warning("Entry %s cannot be removed from disk: %s", key[:12], error)
        self._index.forget(key)

    def _slots(self) -> list[Slot[None]]:
        with self._lock:
            return list(self._ledger)

    def _info(self, slot: Slot[None]) -> EntryInfo | None:
        """What the file of `slot` says; damage is dropped."""
        try:
            return self._read_info(slot.item.key)
        except OtherVersionError:
            return None
        except EntryDamagedError as error:
            self._drop(slot, error)
        except OSError as error:
            log.warning("Entry %s cannot be read: %s", slot.item.key[:12], error)
        return None

    def _read_info(self, key: str) -> EntryInfo:
        fd = os.open(self._directory.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_head(fd, key).info
        finally:
            os.close(fd)

    def _count_read(self, size: int) -> None:
        with self._lock:
            self._counts.read_bytes += size


def _row(item: Item, now: float) -> Row:
    return Row(item.size, now, item.group, item.index)
