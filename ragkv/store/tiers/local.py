"""The part that the memory tier and the writing disk tier share: a ledger and counters behind one lock."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..key import EntryKey
from ..policies import Policy, TurnSize
from .base import Counts, Tier, TierStats
from .ledger import Ledger, Slot

P = TypeVar("P")


class LocalTier(Tier, Generic[P]):
    """A tier of this machine, which evicts by its own policy."""

    def __init__(self, capacity_bytes: int, policy: Policy, clock: Callable[[], float]) -> None:
        self._ledger: Ledger[P] = Ledger(capacity_bytes, policy, self._evict)
        self._counts = Counts()
        self._clock = clock
        self._lock = threading.RLock()  # re-entrant: garbage collection may close an abandoned lease while it is held

    def queued(self, groups: Sequence[str]) -> None:
        with self._lock:
            for group in groups:
                self._ledger.policy.queued(group)

    def left(self, places: Sequence[tuple[str, int]]) -> None:
        with self._lock:
            for group, place in places:
                self._ledger.policy.left(group, place)

    def served(self, turn: TurnSize) -> None:
        with self._lock:
            self._ledger.served(turn, self._clock())

    def free(self, size_bytes: int) -> None:
        with self._lock:
            self._ledger.free(size_bytes, self._clock())

    def contains(self, key: EntryKey) -> bool:
        with self._lock:
            return key in self._ledger

    def block_keys(self) -> list[EntryKey]:
        with self._lock:
            items = [slot.item for slot in self._ledger]
        return [item.key for item in items if item.group and not item.key.is_scores]

    def stats(self) -> TierStats:
        with self._lock:
            ledger = self._ledger
            return self._counts.stats(self.kind, ledger.entries, ledger.used_bytes, ledger.capacity_bytes)

    def _evict(self, slot: Slot[P]) -> None:
        self._counts.evictions += not slot.item.key.is_scores

    def _unpin(self, slot: Slot[P]) -> None:
        with self._lock:
            self._ledger.unpin(slot)

    def _count_read(self, size_bytes: int) -> None:
        with self._lock:
            self._counts.read_bytes += size_bytes
