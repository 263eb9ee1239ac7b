"""Leases: how an entry that was found is read. The contract, a lease of an entry in memory, and leases
of stored records.

A lease of a tier of this machine pins its entry: while the lease is open, the entry is not evicted
and its bytes are not reused. Identity, token ids and checksums are verified before a lease returns
anything. If they are wrong, it raises `EntryDamagedError`, the tier drops the entry, and the caller
treats it as a miss. All methods are thread-safe. Reads release the GIL.
"""

import errno
import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

import torch

from ragkv.errors import EntryDamagedError, StoreError
from ragkv.runtime import Closing

from ..codecs import RAW
from ..entry import EncodedEntry, Entry, EntryInfo, EntryKey, Identity
from ..record import RecordHead, bytes_of, read_fully, read_head

log = logging.getLogger(__name__)

ENTRIES = "entries"  # the folder of entry files, in the disk tier's directory
SUFFIX = ".safetensors"


class TierKind(Enum):
    """Where an entry is stored, fastest first."""

    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"
    S3 = "s3"


class Lease(Closing):
    """One entry held for reading. Use it as a context manager."""

    info: EntryInfo
    kind: TierKind
    # `read_layer` returns views of the tier's own storage and needs no `out`
    in_place: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys and values as they are stored, so the bytes of reading all layers once."""
        return self.info.size_bytes

    def prefetch(self) -> None:
        """Announce that all layers will be read in order: a remote tier begins to fetch them."""

    @abstractmethod
    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer slice (2, G, T, D) of `layer`, verified.

        Returns either `out` (contiguous, same shape and dtype, filled) or a view of the tier's own
        immutable storage: never write to the result. Raises `EntryDamagedError`; the tier has then
        dropped the entry.
        """

    @abstractmethod
    def read_encoded(self) -> EncodedEntry:
        """A verified copy of the whole entry as it is stored, for another tier. Raises as
        `read_layer` does.
        """

    @abstractmethod
    def close(self) -> None:
        """Unpin the entry. Twice is harmless."""


class MemoryLease(Lease):
    """An entry in memory, of a tier or of none. The lease holds a reference to it, so closing only
    unpins it.
    """

    kind = TierKind.MEMORY

    def __init__(
        self,
        entry: Entry | EncodedEntry,
        on_read: Callable[[int], object] = lambda _: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """An `Entry` is served as it is, whatever codec its identity names."""
        if isinstance(entry, Entry):
            entry = EncodedEntry(entry.info, RAW, entry.kv)
        self.info = entry.info
        self.in_place = entry.codec.in_place
        self._entry = entry
        self._layer_bytes = entry.size_bytes // entry.info.layers
        self._on_read = on_read
        self._on_close: Callable[[], None] | None = on_close

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D): a view of the stored tensor if `in_place`, and then `out` is not
        used.
        """
        self._on_read(self._layer_bytes)
        return self._entry.read_layer(layer, out)

    @property
    def stored_bytes(self) -> int:
        return self._entry.size_bytes

    def read_encoded(self) -> EncodedEntry:
        """The stored entry itself, because it is immutable."""
        self._on_read(self.stored_bytes)
        return self._entry

    def close(self) -> None:
        on_close = self._on_close
        self._on_close = None
        if on_close is not None:
            on_close()


class StoredLease(Lease):
    """What leases of disk and remote tiers share: stored layers, read by `_read`, decoded or in
    encoded form.
    """

    def __init__(self, head: RecordHead) -> None:
        """`head` is that of the entry's record, verified."""
        self.info = head.info
        self._head = head

    @property
    def stored_bytes(self) -> int:
        return self.info.layers * self._head.layer_bytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D), read into `out` or into a new host tensor; see
        `Lease.read_layer`.
        """
        info = self.info
        codec = self._head.codec
        target = torch.empty(info.shape, dtype=info.dtype) if out is None else out
        if codec.in_place and target.is_contiguous():
            self._read(layer, target)
            return target
        layout = codec.layout(info.shape, info.dtype)
        stored = torch.empty(layout.shape, dtype=layout.dtype)
        self._read(layer, stored)
        return codec.decode(stored, target)

    def read_encoded(self) -> EncodedEntry:
        info = self.info
        codec = self._head.codec
        layout = codec.layout(info.shape, info.dtype)
        layers = torch.empty((info.layers, *layout.shape), dtype=layout.dtype)
        for number, layer in enumerate(layers):
            self._read(number, layer)
        return EncodedEntry(info, codec, layers)

    @abstractmethod
    def _read(self, layer: int, into: torch.Tensor) -> None:
        """Fill the contiguous tensor `into` with the stored layer, verified and counted."""


class DiskLease(StoredLease):
    """An open entry file. Many threads may call `read_layer` at once, also while another calls
    `close`.
    """

    kind = TierKind.DISK

    def __init__(
        self,
        head: RecordHead,
        file: "_EntryFile",
        on_read: Callable[[int], None],
        on_damage: Callable[[EntryDamagedError], None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(head)
        self._file: _EntryFile | None = file
        self._on_read = on_read
        self._on_damage = on_damage
        self._on_close = on_close
        self._lock = threading.Lock()

    def close(self) -> None:
        """Unpin the entry. Twice is harmless. A read under way keeps the descriptor open until it
        ends.
        """
        with self._lock:
            file = self._file
            self._file = None
        if file is not None:
            self._on_close()

    # an abandoned lease must not keep its descriptor and its pin for ever
    def __del__(self) -> None:
        self.close()

    def _read(self, layer: int, into: torch.Tensor) -> None:
        key = self.info.key
        file = self._file
        stored = bytes_of(into)
        if file is None:
            raise StoreError(f"The lease of entry {key} is closed; read before closing it.")
        try:
            try:
                size = read_fully(file.fd, stored, self._head.layer_offsets[layer])
            except OSError as error:
                raise EntryDamagedError(key, f"layer {layer} cannot be read ({error})") from error
            if size < len(stored):
                raise EntryDamagedError(key, f"the file ends inside layer {layer}")
            self._head.check_layer(layer, stored)
        except EntryDamagedError as error:
            self._on_damage(error)
            raise
        self._on_read(len(stored))


class _EntryFile:
    """An open file. Its descriptor is closed with the last reference, so never under a read of
    another thread.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def entry_file(root: Path, key: EntryKey) -> Path:
    """The file of `key` in the disk tier's directory `root`, whether it exists or not."""
    return root / ENTRIES / key.digest[:2] / f"{key.to_text()}{SUFFIX}"


def open_lease(
    root: Path,
    identity: Identity,
    token_ids: Sequence[int],
    *,
    on_read: Callable[[int], None],
    on_damage: Callable[[EntryDamagedError], None],
    on_close: Callable[[], None] = lambda: None,
) -> DiskLease | None:
    """A lease on the entry of these tokens in the disk tier's directory `root`; `None` if it is
    damaged or cannot be opened.

    `on_close` is called only if a lease is returned. Raises `FileNotFoundError`.
    """
    key = identity.key(token_ids)
    try:
        file = _EntryFile(os.open(entry_file(root, key), os.O_RDONLY | os.O_CLOEXEC))
        head = read_head(file.fd, key)
        head.info.check(identity, token_ids)
        return DiskLease(head, file, on_read, on_damage, on_close)
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
