"""The disk tier: one file an entry, one writing process, and any number of reading processes
(`read_only.py`).

The files alone say what is stored. `entry_files.py` writes and deletes them.

The identity is checked when a file is opened, and a checksum with every layer that is read. A
damaged entry is dropped. A file that is unlinked meanwhile stays readable until its lease is
closed.
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
from pkgutil import resolve_name

import torch

from ragkv.errors import EntryDamagedError, EntryUnreachableError, StoreError

from ..entry import EntryInfo, EntryKey, Identity, StoredEntry
from ..policies import LRU, Policy
from ..record import OtherVersionError, RecordHead, bytes_of, read_head, read_info
from .base import UNLIMITED_BYTES, Tier, TierRequest
from .entry_files import EntryFiles
from .lease import Lease, StoredLease
from .ledger import Ledger, Slot
from .stats import TierKind, TierStats

log = logging.getLogger(__name__)


class DiskTier(Tier):
    """Entries on disk, written by this process alone."""

    kind = TierKind.DISK
    ledger: Ledger[str]  # of the paths of files

    def __init__(self, directory: str | Path, capacity_bytes: int, policy: Policy) -> None:
        """Open `directory`, making it if needed. The capacity counts the bytes of the files.

        Raises `StoreLockedError` if another process writes there, `StoreError` if it cannot be
        written.
        """
        self._files = EntryFiles(Path(directory), capacity_bytes, policy)
        self.ledger = self._files.ledger

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        def opened(slot: Slot[str]) -> Lease | None:
            drop = partial(self.ledger.drop_damaged, slot)
            try:
                lease = open_lease(
                    slot.payload,
                    identity,
                    token_ids,
                    on_read=self.ledger.count_read,
                    on_damage=drop,
                    on_release=partial(self.ledger.release, slot),
                )
            except FileNotFoundError as error:
                drop(unread(slot.item.key, "its file", error))
                return None
            if lease is not None:
                set_used(slot.payload, time.time())
            return lease

        return self.ledger.lease(identity.key(token_ids), opened)

    def put(self, entry: StoredEntry) -> bool:
        return self._files.put(entry)

    def contains(self, key: EntryKey) -> bool:
        return key in self.ledger

    def delete(self, key: EntryKey) -> bool:
        """See `Tier.delete`; a power cut does not undo it. Raises `StoreError` if the file cannot
        be removed, or the disk does not confirm it. Until it does, every deletion raises that.
        """
        return self._files.delete(key)

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        for slot in self.ledger.slots():
            key = slot.item.key
            info = None
            try:
                info = read_info(Path(slot.payload), key)
            except OtherVersionError:
                pass  # it takes space, and `gc` removes it
            except EntryDamagedError as error:
                self.ledger.drop_damaged(slot, error)
            except OSError as error:
                self.ledger.drop_damaged(slot, unread(key, "its file", error))
                continue  # it is dropped already, or `gc` must leave it
            yield key, info

    def reserve(self, size_bytes: int) -> None:
        self._files.reserve(size_bytes)

    def free_disk(self) -> int:
        return self._files.free_disk()

    def stats(self) -> TierStats:
        return self.ledger.stats(self.kind)

    def scratch(self, folder: Path) -> "DiskTier":
        return DiskTier(folder, UNLIMITED_BYTES, LRU())

    def close(self) -> None:
        self._files.close()


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


def open_disk(asked: TierRequest) -> Tier:
    """The tier that `store.directory` asks for, writable or read-only. Raises `StoreError`."""
    config = asked.config
    assert config.directory is not None
    if config.read_only:  # by name, because `read_only.py` imports this file
        tier: Tier = resolve_name("ragkv.store.tiers.read_only:ReadOnlyDiskTier")(config.directory)
        return tier
    return DiskTier(config.directory, config.disk_bytes, asked.policy)
