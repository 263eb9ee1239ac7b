"""Reading one entry file: its identity is checked when it is opened, and a checksum with every layer that is read.

A file that is unlinked meanwhile stays readable until the lease is closed.
"""

import errno
import logging
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

log = logging.getLogger(__name__)

REQUEST_BYTES = 1024**2  # of one direct read; smaller layers are read several at once


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
