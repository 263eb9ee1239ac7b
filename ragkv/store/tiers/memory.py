"""The memory tier: entries in host memory (pinned when CUDA will read them), served as views without a copy.

What it holds are the very tensors it was given when those are compact already: entries are immutable, and nobody may
write to them afterwards. Bounded by the bytes of its tensors.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ragkv.errors import EntryDamagedError

from ..entry import Entry, EntryInfo, Identity
from ..policies import Item, Policy, Turn
from .base import Lease, Tier, TierKind, TierStats
from .ledger import Counts, Ledger, Slot

log = logging.getLogger(__name__)


class MemoryLease(Lease):
    """An entry in memory, held by a reference: closing only unpins it."""

    kind = TierKind.MEMORY

    def __init__(self, entry: Entry, on_read: Callable[[int], None], on_close: Callable[[], None]) -> None:
        self.info = entry.info
        self.sensitivity = entry.sensitivity
        self._kv = entry.kv
        self._on_read = on_read
        self._on_close: Callable[[], None] | None = on_close

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """A view (2, G, T, D) of the stored tensor; `out` is left alone."""
        self._on_read(self.info.layer_bytes)
        return self._kv[layer]

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class MemoryTier(Tier):
    """Entries in host memory."""

    kind = TierKind.MEMORY

    def __init__(
        self, capacity_bytes: int, policy: Policy, pin: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._ledger: Ledger[Entry] = Ledger(capacity_bytes, policy)
        self._counts = Counts()
        self._pin = pin
        self._clock = clock
        self._lock = threading.Lock()

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        with self._lock:
            slot = self._ledger.get(key)
            if slot is not None and not slot.payload.info.proves(identity, token_ids):
                log.warning("%s", EntryDamagedError(key, "its identity or tokens are not those asked for"))
                self._ledger.remove(key)
                self._counts.damaged += 1
                slot = None
            if slot is None:
                self._counts.misses += 1
                return None
            self._counts.hits += 1
            self._ledger.pin(slot)
            self._ledger.used(slot, self._clock())
        return MemoryLease(slot.payload, self._count_read, lambda: self._unpin(slot))

    def put(self, entry: Entry) -> bool:
        item = Item(entry.info.key, self._footprint(entry), entry.info.group, entry.info.index)
        if self.contains(item.key):
            return True
        if item.size > self._ledger.capacity_bytes:
            return False
        entry = entry.settled(self._pin)  # outside the lock: it may copy
        with self._lock:
            if item.key in self._ledger:
                return True
            now = self._clock()
            if not self._ledger.make_room(item, now, self._count_eviction):
                return False
            self._ledger.add(item, entry, now)
            self._counts.written_bytes += item.size
        return True

    def served(self, turn: Turn) -> None:
        with self._lock:
            self._ledger.served(turn, self._clock(), self._count_eviction)

    def contains(self, key: str) -> bool:
        with self._lock:
            return key in self._ledger

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._ledger.remove(key) is not None

    def infos(self) -> Iterator[EntryInfo]:
        with self._lock:
            held = [slot.payload.info for slot in self._ledger]
        yield from held

    def stats(self) -> TierStats:
        with self._lock:
            return self._ledger.stats(self.kind, self._counts)

    def close(self) -> None:
        """Let go of every entry. Open leases stay readable."""
        with self._lock:
            for slot in list(self._ledger):
                self._ledger.remove(slot.item.key)

    def _footprint(self, entry: Entry) -> int:
        """Bytes the entry takes here: torch hands out pinned memory in powers of two."""
        if not (self._pin and torch.cuda.is_available()):
            return entry.size_bytes
        return (1 << (entry.kv.nbytes - 1).bit_length()) + entry.size_bytes - entry.kv.nbytes

    def _unpin(self, slot: Slot[Entry]) -> None:
        with self._lock:
            self._ledger.unpin(slot)

    def _count_read(self, size: int) -> None:
        with self._lock:
            self._counts.read_bytes += size

    def _count_eviction(self, _slot: Slot[Entry]) -> None:
        self._counts.evictions += 1
