"""Reading an entry file: through the page cache or past it (O_DIRECT), layers decoded, and verified as they are read.

The identity is checked when a file is opened, a checksum with every layer. A file that is unlinked meanwhile stays
readable until its lease is closed.

For a direct read, memory address, file offset and length must be multiples of a page (4 KiB). Layers begin at a page
in the file and are padded to a page, so only the memory matters. An aligned buffer is read directly; its last partial
page goes through a scratch page in the same request. Any other buffer is filled from scratch memory of the thread.
The head is read directly too: through the page cache, the kernel would read far ahead into the layers.
"""

import contextlib
import errno
import logging
import math
import mmap
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from ragkv.errors import EntryDamagedError, StoreError

from ..codecs import Codec
from ..entry import EncodedEntry, EntryInfo, Identity
from ..key import EntryKey
from ..record import ALIGNMENT, HEAD_GUESS, RecordHead, bytes_of, check_length, parse_head, read_fully, read_head
from .base import Lease, TierKind

log = logging.getLogger(__name__)

HUGE_PAGE = 2 * 1024**2  # The size of a huge page in bytes.
REQUEST_BYTES = 1024**2  # A direct read has so many bytes; smaller layers are read several at once.

_SCRATCH = threading.local()  # Each thread keeps scratch memory for the largest read that it made.


class EntryFile:
    """An open file. Its descriptor is closed with the last reference, so never under a read of another thread."""

    def __init__(self, fd: int, path: Path, direct: bool) -> None:
        self._fd, self._path = fd, path
        self.direct = direct  # reads go past the page cache, so the kernel does not read ahead

    @classmethod
    def open(cls, path: Path, direct: bool) -> Self:
        """Open `path`, for direct reads if asked and if the system supports them. Raises `OSError`."""
        flag = getattr(os, "O_DIRECT", None)
        if direct and flag is not None:
            with contextlib.suppress(OSError):  # an error of the file itself is raised by the second open
                return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag), path, True)
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, False)

    def __del__(self) -> None:
        os.close(self._fd)

    def head(self, key: EntryKey) -> RecordHead:
        """See `read_head`."""
        if not self.direct:
            return read_head(self._fd, key)
        try:
            head = parse_head(key, self._first(HEAD_GUESS), self._first)
            check_length(head, os.fstat(self._fd).st_size)
            return head
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fall_back()  # the file system opens with O_DIRECT, but does not read with it
            return read_head(self._fd, key)

    def read(self, into: Sequence[torch.Tensor], offset: int) -> list[memoryview]:
        """Fill contiguous host tensors of equal size from `offset` on; each begins at the next page of the file.

        Returns the bytes of the tensors that were filled: fewer if the file ends. Releases the GIL. Raises `OSError`.
        """
        views = [bytes_of(tensor) for tensor in into]
        if self.direct and any(tensor.data_ptr() % ALIGNMENT for tensor in into):
            stored = self.read(scratch_pieces(len(into), len(views[0])), offset)
            for view, piece in zip(views, stored, strict=False):
                np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(piece, np.uint8))  # releases the GIL
            return views[: len(stored)]
        size = len(views[0])
        stride = _padded(size)
        filled = 0
        while filled < len(views):
            start = offset + filled * stride
            if self.direct:
                got = self._read_direct(views[filled:], start)
            else:
                got = read_fully(self._fd, views[filled], start)
            if got < size and not (self.direct and self._continue(views[filled], start, got)):
                break
            filled += 1 + max(0, got - size) // stride
        return views[:filled]

    def _read_direct(self, into: Sequence[memoryview], offset: int) -> int:
        """Fill aligned buffers with one request, each buffer's last partial page through a scratch page."""
        tail = len(into[0]) % ALIGNMENT
        if not tail:
            return os.preadv(self._fd, into, offset)
        whole = len(into[0]) - tail
        pages = [bytes_of(page) for page in scratch_pieces(len(into), ALIGNMENT, "last pages")]
        vectors = [part for view, page in zip(into, pages, strict=True) for part in (view[:whole], page) if part]
        got = os.preadv(self._fd, vectors, offset)
        for view, page in zip(into, pages, strict=True):
            view[whole:] = page[:tail]
        return got

    def _continue(self, into: memoryview, offset: int, done: int) -> bool:
        """Read on after a request that brought only `done` bytes, as some file systems do; whether `into` is full."""
        while done < len(into):
            whole = done - done % ALIGNMENT
            got = self._read_direct([into[whole:]], offset + whole)
            if whole + got <= done:
                return False
            done = whole + got
        return True

    def _first(self, size: int) -> bytes:
        """The file's first `size` bytes, or all if it has fewer."""
        start = bytes_of(scratch_pieces(1, _padded(size))[0])
        return bytes(start[: min(size, read_fully(self._fd, start, 0))])

    def _fall_back(self) -> None:
        """Read through the page cache from now on."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._fd)
        self._fd, self.direct = fd, False


class StoredLease(Lease):
    """What leases of disk and remote tiers share: stored layers, read by `_read`, decoded or in encoded form."""

    def __init__(self, info: EntryInfo, sensitivity: torch.Tensor | None, codec: Codec, layer_bytes: int) -> None:
        """`layer_bytes` are the bytes of one stored layer."""
        self.info, self.sensitivity = info, sensitivity
        self._codec, self._layer_bytes = codec, layer_bytes

    @property
    def stored_bytes(self) -> int:
        return self.info.layers * self._layer_bytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D), read into `out` or into a new host tensor; see `Lease.read_layer`."""
        return self.read_layers(layer, [out])[0]

    def read_layers(self, first: int, outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        info, codec = self.info, self._codec
        targets = [aligned_empty(info.shape, info.dtype) if out is None else out for out in outs]
        if codec.in_place and all(target.is_contiguous() for target in targets):
            self._read(first, targets)
            return targets
        layout = codec.layout(info.shape, info.dtype)
        pieces = scratch_pieces(len(targets), self._layer_bytes)
        self._read(first, pieces)
        return [
            codec.decode(stored.view(layout.dtype).view(layout.shape), target)
            for stored, target in zip(pieces, targets, strict=True)
        ]

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        info, codec = self.info, self._codec
        layout = codec.layout(info.shape, info.dtype)
        page_locked = page_locked and codec.in_place and torch.cuda.is_available()
        layers = torch.empty((info.layers, *layout.shape), dtype=layout.dtype, pin_memory=page_locked)
        for first in range(0, info.layers, self.layers_per_read):
            before_read()
            self._read(first, layers[first : first + self.layers_per_read].unbind())
        return EncodedEntry(info, codec, layers, self.sensitivity)

    @abstractmethod
    def _read(self, first: int, into: Sequence[torch.Tensor]) -> None:
        """Fill the contiguous tensors `into` with stored layers from `first` on, verified and counted."""


class DiskLease(StoredLease):
    """An open entry file. Many threads may call `read_layer` at once, also while another calls `close`."""

    kind = TierKind.DISK

    def __init__(
        self,
        head: RecordHead,
        file: EntryFile,
        on_read: Callable[[int], None],
        on_damage: Callable[[EntryDamagedError], None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(head.info, head.sensitivity, head.codec, head.layer_bytes)
        self._head = head
        self._file: EntryFile | None = file
        # The kernel does not read ahead for direct reads, so the disk would be idle while a small layer is checked.
        self.layers_per_read = max(1, REQUEST_BYTES // max(ALIGNMENT, head.layer_bytes)) if file.direct else 1
        self._on_read, self._on_damage, self._on_close = on_read, on_damage, on_close
        self._lock = threading.Lock()

    def close(self) -> None:
        """Unpin the entry. Twice is harmless. A read under way keeps the descriptor open until it ends."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            self._on_close()

    def __del__(self) -> None:  # an abandoned lease must not keep its descriptor and its pin for ever
        self.close()

    def _read(self, first: int, into: Sequence[torch.Tensor]) -> None:
        key, file = self.info.key, self._file
        if file is None:
            raise StoreError(f"The lease of entry {key} is closed; read before closing it.")
        try:
            try:
                filled = file.read(into, self._head.layer_offsets[first])
            except OSError as error:
                raise EntryDamagedError(key, f"layer {first} cannot be read ({error})") from error
            for layer, stored in enumerate(filled, first):
                self._head.check_layer(layer, stored)
            if len(filled) < len(into):
                raise EntryDamagedError(key, f"the file ends inside layer {first + len(filled)}")
        except EntryDamagedError as error:
            self._on_damage(error)
            raise
        self._on_read(self._layer_bytes * len(into))


def open_lease(
    path: Path,
    identity: Identity,
    token_ids: Sequence[int],
    *,
    direct: bool,
    on_read: Callable[[int], None],
    on_damage: Callable[[EntryDamagedError], None],
    on_close: Callable[[], None] = lambda: None,
) -> DiskLease | None:
    """A lease on the entry of these tokens, whose file is `path`; `None` if it is damaged or cannot be opened.

    `direct` reads past the page cache. `on_close` is called only if a lease is returned. Raises `FileNotFoundError`.
    """
    key = identity.key(token_ids)
    try:
        file = EntryFile.open(path, direct)
        head = file.head(key)
        if head.info.is_of_other_network(identity, token_ids):
            return None
        if not head.info.matches(identity, token_ids):
            raise EntryDamagedError(key, "its identity or tokens are not those asked for")
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


def aligned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised host tensor whose address is a multiple of 4 KiB, as O_DIRECT reads need.

    From 2 MiB on, it asks the system for huge pages: the kernel describes every run of neighbouring pages to the disk
    separately, and the disk fills memory scattered over the heap at less than half the speed (docs/log.md).
    """
    size = dtype.itemsize * math.prod(shape)
    if size < HUGE_PAGE:
        raw, aligned = torch.empty(size + ALIGNMENT, dtype=torch.uint8), ALIGNMENT
    else:
        raw, aligned = _mapped(size), HUGE_PAGE
    start = -raw.data_ptr() % aligned
    return raw[start : start + size].view(dtype).view(tuple(shape))


def _mapped(size: int) -> torch.Tensor:
    """A memory mapping, unmapped with the tensor, in which `size` bytes can begin at a huge page."""
    memory = mmap.mmap(-1, size + -size % HUGE_PAGE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def scratch_pieces(count: int, size: int, name: str = "scratch") -> Sequence[torch.Tensor]:
    """`count` aligned buffers of `size` bytes, valid until this thread asks for the scratch memory `name` again."""
    stride = _padded(size)
    memory: torch.Tensor | None = getattr(_SCRATCH, name, None)
    if memory is None or memory.numel() < count * stride:
        memory = aligned_empty((count * stride,), torch.uint8)
        setattr(_SCRATCH, name, memory)
    return [piece[:size] for piece in torch.split(memory[: count * stride], stride)]


def _padded(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT
