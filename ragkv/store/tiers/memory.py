"""The memory tier: entries in host memory, as their codec lays them down.

Raw ones are served as views without a copy (pinned when CUDA will read them), and what is held are the very tensors
that were given when those are compact already: entries are immutable, and nobody may write to them afterwards. Others
are decoded into the reader's buffer. Bounded by the bytes of its tensors.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set

import torch

from ragkv.errors import EntryDamagedError

from ..encoded import EncodedEntry
from ..entry import Entry, EntryInfo, Identity
from ..policies import Item, Policy, Turn
from .base import Lease, Tier, TierKind, TierStats
from .ledger import Counts, Ledger, Slot

log = logging.getLogger(__name__)


class MemoryLease(Lease):
    """An entry in memory, held by a reference: closing only unpins it."""

    kind = TierKind.MEMORY

    def __init__(self, entry: EncodedEntry, on_read: Callable[[int], None], on_close: Callable[[], None]) -> None:
        self.info = entry.info
        self.sensitivity = entry.sensitivity
        self.in_place = entry.codec.in_place
        self._entry = entry
        self._on_read = on_read
        self._on_close: Callable[[], None] | None = on_close

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D): a view of the stored tensor if `in_place`, `out` is left alone then."""
        self._on_read(self._entry.layers[layer].nbytes)
        return self._entry.read_layer(layer, out)

    @property
    def stored_bytes(self) -> int:
        return self._entry.stored_bytes

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        """What is held, itself: it is immutable."""
        self._on_read(self.stored_bytes)
        return self._entry

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class MemoryTier(Tier):
    """Entries in host memory."""

    kind = TierKind.MEMORY

    def __init__(
        self, capacity_bytes: int, policy: Policy, page_locked: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._ledger: Ledger[EncodedEntry] = Ledger(capacity_bytes, policy)
        self._counts = Counts()
        self._page_locked = page_locked
        self._clock = clock
        self._lock = threading.Lock()

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        with self._lock:
            slot = self._ledger.get(key)
            if slot is not None and not slot.payload.info.matches(identity, token_ids):
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

    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
        if self.contains(entry.info.key):
            return True
        encoded = EncodedEntry.of(entry)  # outside the lock, as what follows: it may take time
        item = Item(entry.info.key, self._footprint(encoded), entry.info.group, entry.info.index)
        if item.size > self._ledger.capacity_bytes:
            return False
        encoded = encoded.compact(self._page_locked)
        with self._lock:
            if item.key in self._ledger:
                return True
            now = self._clock()
            if not self._ledger.make_room(item, now, self._count_eviction, protected):
                return False
            self._ledger.add(item, encoded, now)
            self._counts.written_bytes += item.size
        return True

    def free(self, size_bytes: int) -> None:
        with self._lock:
            self._ledger.free(size_bytes, self._clock(), self._count_eviction)

    def queued(self, groups: Sequence[str]) -> None:
        with self._lock:
            self._ledger.queued(groups)

    def left(self, places: Sequence[tuple[str, int]]) -> None:
        with self._lock:
            self._ledger.left(places)

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

    def _footprint(self, entry: EncodedEntry) -> int:
        """Bytes the entry takes here: torch hands out pinned memory in powers of two."""
        if not (self._page_locked and entry.codec.in_place and torch.cuda.is_available()):
            return entry.size_bytes
        return (1 << (entry.stored_bytes - 1).bit_length()) + entry.size_bytes - entry.stored_bytes

    def _unpin(self, slot: Slot[EncodedEntry]) -> None:
        with self._lock:
            self._ledger.unpin(slot)

    def _count_read(self, size: int) -> None:
        with self._lock:
            self._counts.read_bytes += size

    def _count_eviction(self, _slot: Slot[EncodedEntry]) -> None:
        self._counts.evictions += 1
