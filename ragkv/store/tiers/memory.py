"""The memory tier: entries in host memory in their stored form, bounded by the bytes of their
tensors.

Raw entries are served as views, without a copy. Other codecs decode into the reader's buffer. If
CUDA will read the entries, they are page-locked, and copied to the device in their stored form. If
the tensors given to `put` are compact already, the tier holds those very tensors. So the caller
must not write to them afterwards.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ragkv.errors import EntryDamagedError

from ..codecs import RAW
from ..entry import Entry, EntryInfo, EntryKey, Identity, StoredEntry
from ..policies import Item, Policy
from ..stored_form import stored_form
from .base import Tier, TierRequest
from .lease import Lease
from .ledger import Ledger, Slot
from .stats import TierKind, TierStats

log = logging.getLogger(__name__)


class MemoryLease(Lease):
    """An entry in memory, of a tier or of none. The lease holds a reference to it, so closing only
    unpins it.
    """

    kind = TierKind.MEMORY

    def __init__(
        self,
        entry: Entry | StoredEntry,
        on_read: Callable[[int], object] = lambda _: None,
        on_release: Callable[[], None] = lambda: None,
    ) -> None:
        """An `Entry` is served as it is, whatever codec its identity names."""
        if isinstance(entry, Entry):
            entry = StoredEntry(entry.info, RAW, entry.kv)
        self.info = entry.info
        self.in_place = entry.codec.in_place
        self.codec = entry.codec
        self._entry = entry
        self._layer_bytes = entry.size_bytes // entry.info.layers
        self._on_read = on_read
        self._on_release: Callable[[], None] | None = on_release

    @property
    def stored_bytes(self) -> int:
        return self._entry.size_bytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D): a view of the stored tensor if `in_place`, and then `out` is not
        used.
        """
        self._on_read(self._layer_bytes)
        return self._entry.read_layer(layer, out)

    def read_stored(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """A view of the stored layer."""
        self._on_read(self._layer_bytes)
        return self._entry.layers[layer]

    def read_entry(self) -> StoredEntry:
        """The stored entry itself, because it is immutable."""
        self._on_read(self.stored_bytes)
        return self._entry

    def release(self) -> None:
        on_release = self._on_release
        self._on_release = None
        if on_release is not None:
            on_release()


class MemoryTier(Tier):
    """Entries in host memory."""

    kind = TierKind.MEMORY
    ledger: Ledger[StoredEntry]

    def __init__(
        self,
        capacity_bytes: int,
        policy: Policy,
        page_locked: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = Ledger(capacity_bytes, policy, clock=clock)
        self.page_locked = page_locked and torch.cuda.is_available()

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        def opened(slot: Slot[StoredEntry]) -> Lease | None:
            try:
                slot.payload.info.check(identity, token_ids)
            except EntryDamagedError as error:
                self.ledger.drop_damaged(slot, error)
                return None
            release = partial(self.ledger.release, slot)
            return MemoryLease(slot.payload, self.ledger.count_read, release)

        return self.ledger.lease(identity.key(token_ids), opened)

    def put(self, entry: StoredEntry) -> bool:
        item = Item(entry.info.key, self._footprint(entry), entry.info.group, entry.info.index)
        if self.contains(item.key):
            return True
        if item.size > self.ledger.capacity_bytes:
            return False
        if self.page_locked:  # without the lock: it may take long
            entry = stored_form(entry, page_locked=True)
        with self.ledger.lock:
            if item.key in self.ledger:
                return True
            if not self.ledger.make_room(item):
                return False
            self.ledger.add(item, entry)
            self.ledger.counts.written_bytes += item.size
        return True

    def contains(self, key: EntryKey) -> bool:
        return key in self.ledger

    def delete(self, key: EntryKey) -> bool:
        return self.ledger.remove(key) is not None

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        return ((slot.item.key, slot.payload.info) for slot in self.ledger.slots())

    def stats(self) -> TierStats:
        return self.ledger.stats(self.kind)

    def close(self) -> None:
        """Drop every entry. Open leases stay readable."""
        self.ledger.close()

    def _footprint(self, entry: StoredEntry) -> int:
        """Bytes that the entry takes here: torch allocates page-locked memory in powers of two."""
        if not self.page_locked:
            return entry.size_bytes
        return 1 << (entry.size_bytes - 1).bit_length()


def open_memory(asked: TierRequest) -> MemoryTier:
    """The tier that `store.memory_bytes` asks for."""
    return MemoryTier(asked.config.memory_bytes, asked.policy, asked.page_locked)
