"""Reading one entry file: identified when it is opened, checksummed with every layer that is read.

The open descriptor is the lease's hold on its bytes: a file unlinked meanwhile stays readable until `close`.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ragkv.errors import EntryDamagedError, StoreError

from ..entry import Identity
from ..record import ALIGNMENT, RecordHead
from .base import TierKind
from .disk_file import EntryFile
from .stored_lease import StoredLease

REQUEST_BYTES = 1024**2  # of a read past the page cache, of several layers where they are smaller


class DiskLease(StoredLease):
    """An entry file held open. `read_layer` may be called from many threads at once, also while another closes."""

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
        self._file = file
        # Past the page cache nobody reads ahead: the disk would rest while a small layer is checked.
        self.layers_per_read = max(1, REQUEST_BYTES // max(ALIGNMENT, head.layer_bytes)) if file.direct else 1
        self._on_read, self._on_damage, self._on_close = on_read, on_damage, on_close
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False

    def close(self) -> None:
        """Unpin, and let the descriptor go once no read is under way: its number may be another file's then."""
        with self._lock:
            closing, self._closed = not self._closed, True
            idle = self._readers == 0
        if closing and idle:
            self._release()

    def __del__(self) -> None:  # a lease nobody closed must not keep its descriptor and its pin for ever
        self.close()

    def _read(self, first: int, into: Sequence[torch.Tensor]) -> None:
        key = self.info.key
        try:
            self._enter()
            try:
                filled = self._file.read(into, self._head.layer_offsets[first])
                for layer, stored in enumerate(filled, first):
                    self._head.check_layer(layer, stored)
                if len(filled) < len(into):
                    raise EntryDamagedError(key, f"the file ends inside layer {first + len(filled)}")
            except OSError as error:
                raise EntryDamagedError(key, f"layer {first} cannot be read ({error})") from error
            finally:
                self._leave()
        except EntryDamagedError as error:
            self._on_damage(error)
            raise
        self._on_read(self._layer_bytes * len(into))

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

    def _release(self) -> None:
        self._file.close()
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
    file = EntryFile.open(path, direct)
    try:
        head = file.head(key)
        if not head.info.matches(identity, token_ids):
            raise EntryDamagedError(key, "its identity or tokens are not those asked for")
        return DiskLease(head, file, on_read, on_damage, on_close)
    except BaseException:
        file.close()
        raise
