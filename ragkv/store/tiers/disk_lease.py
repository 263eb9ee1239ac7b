"""Reading one entry file: identified when it is opened, checksummed with every layer that is read.

The open descriptor is the lease's hold on its bytes: a file unlinked meanwhile stays readable until `close`.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ragkv.errors import EntryDamagedError, StoreError

from ..entry import Identity
from ..record import ALIGNMENT, Head, bytes_of, read_fully, read_head
from .base import Lease, TierKind

log = logging.getLogger(__name__)


class DiskLease(Lease):
    """An entry file held open. `read_layer` may be called from many threads at once, also while another closes."""

    kind = TierKind.DISK

    def __init__(
        self,
        head: Head,
        fd: int,
        direct_fd: int | None,
        on_read: Callable[[int], None],
        on_damage: Callable[[EntryDamagedError], None],
        on_close: Callable[[], None],
    ) -> None:
        self.info = head.info
        self.sensitivity = head.sensitivity
        self._head = head
        self._fd = fd
        self._direct_fd = direct_fd
        self._on_read, self._on_damage, self._on_close = on_read, on_damage, on_close
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D), read into `out` or a fresh tensor, on the host; see `Lease.read_layer`."""
        head, info = self._head, self.info
        if out is None:
            out = torch.empty((2, info.kv_heads, info.tokens, info.head_dim), dtype=info.dtype)
        shape, dtype = head.codec.stored_shape(info), head.codec.stored_dtype(info)
        same = tuple(out.shape) == shape and out.dtype == dtype and out.is_contiguous()
        stored = out if same else torch.empty(shape, dtype=dtype)
        try:
            self._read(layer, bytes_of(stored))
        except EntryDamagedError as error:
            self._on_damage(error)
            raise
        self._on_read(head.layer_bytes)
        return head.codec.decode(stored, out)

    def close(self) -> None:
        """Unpin, and let the descriptor go once no read is under way: its number may be another file's then."""
        with self._lock:
            closing, self._closed = not self._closed, True
            idle = self._readers == 0
        if closing and idle:
            self._release()

    def __del__(self) -> None:  # a lease nobody closed must not keep its descriptor and its pin for ever
        self.close()

    def _read(self, layer: int, into: memoryview) -> None:
        self._enter()
        try:
            if self._fill(into, self._head.layer_offsets[layer]) != self._head.layer_bytes:
                raise EntryDamagedError(self.info.key, f"the file ends inside layer {layer}")
            self._head.check_layer(layer, into)
        except OSError as error:
            raise EntryDamagedError(self.info.key, f"layer {layer} cannot be read ({error})") from error
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise StoreError(f"The lease of entry {self.info.key[:12]} is closed; read before closing it.")
            self._readers += 1

    def _leave(self) -> None:
        with self._lock:
            self._readers -= 1
            last = self._closed and self._readers == 0
        if last:
            self._release()

    def _fill(self, into: memoryview, offset: int) -> int:
        """Read the whole of `into`; the page-sized part past the page cache if asked for and aligned."""
        whole = len(into) // ALIGNMENT * ALIGNMENT
        if self._direct_fd is None or not whole or _address(into) % ALIGNMENT:
            return read_fully(self._fd, into, offset)
        done = read_fully(self._direct_fd, into[:whole], offset)
        return done if done < whole else done + read_fully(self._fd, into[whole:], offset + whole)

    def _release(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                os.close(fd)
        self._on_close()


def open_lease(
    path: Path,
    key: str,
    identity: Identity,
    token_ids: Sequence[int],
    direct: bool,
    on_read: Callable[[int], None],
    on_damage: Callable[[EntryDamagedError], None],
    on_close: Callable[[], None],
) -> DiskLease:
    """A lease on the file at `path`, proven to be the entry asked for.

    Raises `EntryDamagedError` if it is not, `OSError` if it cannot be opened; the callbacks are not called then.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = read_head(fd, key)
        if not head.info.proves(identity, token_ids):
            raise EntryDamagedError(key, "its identity or tokens are not those asked for")
        return DiskLease(head, fd, _open_direct(path) if direct else None, on_read, on_damage, on_close)
    except BaseException:
        os.close(fd)
        raise


def aligned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised host tensor that begins at a multiple of 4 KiB, as O_DIRECT reads need."""
    size = dtype.itemsize
    for side in shape:
        size *= side
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size].view(dtype).view(tuple(shape))


def _open_direct(path: Path) -> int | None:
    """A descriptor past the page cache, or `None` where the system or file system has none."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    return None


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
