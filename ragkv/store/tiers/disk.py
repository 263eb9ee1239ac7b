"""The disk tier: one file an entry, with one writing process and any number of reading processes
(`read_only.py`). The files alone say what is stored (`entry_files.py`).

A put takes these steps: evict, write and sync the bytes under a temporary name, rename, sync the
directory, add the entry to the ledger. A kill between two steps leaves either nothing visible or a
complete entry. A deletion syncs the directory too. The identity is checked when a file is opened,
and a checksum with every layer that is read; what is damaged is found then, and dropped. A file
that is unlinked meanwhile stays readable until its lease is closed.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from ragkv.errors import EntryDamagedError, StoreError
from ragkv.runtime import make_private_folder, replace_file, sync

from ..entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from ..policies import Item, Policy, TurnSize
from ..record import OtherVersionError, RecordHead, bytes_of, read_head, read_info, record_of
from .base import Lease, StoredLease
from .entry_files import file_of, listed, open_for_writing
from .ledger import LocalTier, Slot
from .stats import TierKind

log = logging.getLogger(__name__)

SMALL_BYTES = 16 << 20  # Fewer bytes of entries give way as a whole.


def open_lease(
    path: str | Path,
    identity: Identity,
    token_ids: Sequence[int],
    *,
    on_read: Callable[[int], None],
    on_damage: Callable[[EntryDamagedError], None],
    on_release: Callable[[], None] = lambda: None,
) -> "DiskLease | None":
    """A lease on the entry of these tokens in `path`; `None` if it is damaged or cannot be opened.

    `on_release` is called only if a lease is returned. Raises `FileNotFoundError`.
    """
    key = identity.key(token_ids)
    try:
        file = _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        head = read_head(file.fd, key)
        head.info.check(identity, token_ids)
        return DiskLease(head, file, on_read, on_damage, on_release)
    except FileNotFoundError:
        raise
    except EntryDamagedError as error:
        on_damage(error)
    except OSError as error:
        if error.errno == errno.EIO:
            on_damage(EntryDamagedError(key, f"its file cannot be read ({error})"))
        else:  # too many open files, for example: the entry itself is sound
            log.warning("Entry %s cannot be opened: %s. It counts as a miss.", key, error)
    return None


class DiskLease(StoredLease):
    """An open entry file. Many threads may call `read_layer` at once, also while another calls
    `close`.
    """

    kind = TierKind.DISK

    def __init__(
        self,
        head: RecordHead,
        file: "_OpenFile",
        on_read: Callable[[int], None],
        on_damage: Callable[[EntryDamagedError], None],
        on_release: Callable[[], None],
    ) -> None:
        super().__init__(head)
        self._file: _OpenFile | None = file
        self._on_read = on_read
        self._on_damage = on_damage
        self._on_release = on_release
        self._lock = threading.Lock()

    def release(self) -> None:
        """See `Lease.release`. A read under way keeps the descriptor open until it ends."""
        with self._lock:
            file = self._file
            self._file = None
        if file is not None:
            self._on_release()

    def _read(self, layer: int, into: torch.Tensor) -> None:
        key = self.info.key
        file = self._file
        if file is None:
            raise StoreError(f"The lease of entry {key} is closed; read before closing it.")
        stored = bytes_of(into)
        try:
            try:
                size = _read_fully(file.fd, stored, self._head.layer_start(layer))
            except OSError as error:
                raise EntryDamagedError(key, f"layer {layer} cannot be read ({error})") from error
            if size < len(stored):
                raise EntryDamagedError(key, f"the file ends inside layer {layer}")
            self._head.check_layer(layer, stored)
        except EntryDamagedError as error:
            self._on_damage(error)
            raise
        self._on_read(len(stored))


class DiskTier(LocalTier[str]):
    """Entries on disk, written by this process alone."""

    kind = TierKind.DISK

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
        self._closed = False
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
            if not is_second and self._ledger.make_space(file.item, file.used):
                self._ledger.add(file.item, file.path, file.used)
            else:  # larger than the whole capacity, which may be a smaller setting now
                _unlink(file.path)

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        with self._lock:
            slot = None if self._closed else self._ledger.get(key)
            if slot is None:
                self._counts.misses += 1
                return None
            self._ledger.pin(slot)
        lease = None
        try:
            lease = open_lease(
                slot.payload,
                identity,
                token_ids,
                on_read=self._count_read,
                on_damage=partial(self._drop, slot),
                on_release=partial(self._unpin, slot),
            )
        except FileNotFoundError as error:
            self._drop(slot, EntryDamagedError(key, f"its file is gone ({error})"))
        now = self._clock()
        with self._lock:
            self._counts.hits += lease is not None
            self._counts.misses += lease is None
            if lease is None:
                self._ledger.unpin(slot)
            elif self._ledger.get(key) is slot:
                self._ledger.used(slot, now)
        if lease is not None:
            _set_used(slot.payload, now)
        return lease

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
                if self._closed or not self._ledger.make_space(item, self._clock()):
                    return False
            return self._write(item, head, *layers)

    def served(self, turn: TurnSize) -> None:
        with self._write_lock:  # not between making space and writing
            super().served(turn)

    def leave(self, size_bytes: int) -> None:
        """See `Tier.leave`; what has no room any more is evicted."""
        with self._write_lock, self._lock:
            self._ledger.resize(max(0, self._capacity_bytes - size_bytes), self._clock())

    def give_way(self) -> int:
        """See `Tier.give_way`: half of the entries."""
        with self._write_lock, self._lock:
            before = self._ledger.used_bytes
            capacity_bytes = self._ledger.capacity_bytes
            self._ledger.resize(before // 2 if before > SMALL_BYTES else 0, self._clock())
            self._ledger.capacity_bytes = capacity_bytes
            return before - self._ledger.used_bytes

    def delete(self, key: EntryKey) -> bool:
        """See `Tier.delete`; a power cut does not undo it. Raises `StoreError` if the file cannot
        be removed.
        """
        with self._lock:
            slot = self._ledger.get(key)
            if slot is None:
                return False
            try:
                path = Path(slot.payload)
                path.unlink(missing_ok=True)
                sync(path.parent)
            except OSError as error:
                raise StoreError(
                    f"Entry {key} could not be deleted from disk: {error}. It is still there; "
                    "`ragkv gc` deletes what no document has."
                ) from error
            self._ledger.remove(key)
        return True

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
                log.warning("Entry %s cannot be read: %s", key, error)
            yield key, info

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
        _set_used(path, now)
        with self._lock:
            self._write_failed = False
            self._ledger.add(item, str(path), now)
            self._counts.written_bytes += item.size
        return True

    def _drop(self, slot: Slot[str], why: EntryDamagedError) -> None:
        with self._lock:
            if self._ledger.get(slot.item.key) is not slot:
                return  # it was deleted, evicted or dropped meanwhile
            log.warning("%s", why)
            self._counts.damaged += 1
            self._ledger.remove(slot.item.key)
            _unlink(slot.payload)

    def _evict(self, slot: Slot[str]) -> None:
        super()._evict(slot)
        _unlink(slot.payload)


class _OpenFile:
    """An open file. Its descriptor is closed with the last reference, so never under a read of
    another thread.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def _read_fully(fd: int, into: memoryview, offset: int) -> int:
    """Fill `into` from `offset` of `fd`; the number of bytes read, fewer at the end of the file.
    Releases the GIL.
    """
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def _set_used(path: str | Path, now: float) -> None:
    """Note the last use of a file. A loss changes only what is evicted first after a restart."""
    with contextlib.suppress(OSError):
        os.utime(path, (now, now))


def _unlink(path: str) -> None:
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("The entry in %s cannot be removed from disk: %s", path, error)
