"""Reads the disk tier: looks an entry up, opens its file and verifies its layers.

The identity is checked when a file is opened, and a checksum with every layer that is read. A
damaged entry is dropped. A file that is unlinked meanwhile stays readable until its lease is
closed. `disk.py` says how files are written.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ragkv.errors import EntryDamagedError, EntryUnreachableError, StoreError

from ..entry import EntryKey, Identity
from ..record import RecordHead, bytes_of, read_head
from .lease import Lease, StoredLease
from .ledger import LocalTier, Slot
from .stats import TierKind

log = logging.getLogger(__name__)


class DiskReads(LocalTier[str]):
    """What a question needs of the disk tier. A slot's payload is the path of its file."""

    kind = TierKind.DISK
    _closed = False

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
            self._drop(slot, unread(key, "its file", error))
        finally:  # whatever was raised, nothing stays pinned without a lease
            with self._lock:
                self._counts.hits += lease is not None
                self._counts.misses += lease is None
                if lease is None:
                    self._ledger.unpin(slot)
        if lease is not None:
            now = self._clock()
            with self._lock:
                if self._ledger.get(key) is slot:
                    self._ledger.used(slot, now)
            set_used(slot.payload, now)
        return lease

    def _drop(self, slot: Slot[str], why: EntryDamagedError) -> None:
        """Drop an entry that is damaged; one that could not be read now stays."""
        with self._lock:
            if self._ledger.get(slot.item.key) is not slot:
                return  # it was deleted, evicted or dropped meanwhile
            log.warning("%s", why)
            if isinstance(why, EntryUnreachableError):
                return
            self._counts.damaged += 1
            self._ledger.remove(slot.item.key)
            unlink(slot.payload)


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
    `on_damage` is called with what any read finds, also with an `EntryUnreachableError`.

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
        on_damage(unread(key, "its file", error))
    return None


def unread(key: EntryKey, what: str, error: OSError) -> EntryDamagedError:
    """What an error of reading `what` says of the entry. Bytes that are gone, or that the disk
    cannot give, are damage; too many open files or no memory say nothing, and the entry stays.
    """
    if error.errno in (errno.EIO, errno.ENOENT):
        return EntryDamagedError(key, f"{what} cannot be read ({error})")
    return EntryUnreachableError(key, f"{what} gave {error}")


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
                raise unread(key, f"layer {layer}", error) from error
            if size < len(stored):
                raise EntryDamagedError(key, f"the file ends inside layer {layer}")
            self._head.check_layer(layer, stored)
        except EntryDamagedError as error:
            self._on_damage(error)
            raise
        self._on_read(len(stored))


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


def set_used(path: str | Path, now: float) -> None:
    """Note the last use of a file. A loss changes only what is evicted first after a restart."""
    with contextlib.suppress(OSError):
        os.utime(path, (now, now))


def unlink(path: str) -> None:
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("The entry in %s cannot be removed from disk: %s", path, error)
