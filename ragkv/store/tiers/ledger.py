"""The books of one tier: who is held, how many bytes that is, who is pinned, and who goes when room is needed.

Metadata only; the tier holds the lock and moves the bytes. The invariants: `used_bytes` is the sum of the held items'
sizes and never above the capacity, and a pinned item is never a victim.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from ..policies import Item, Policy
from .base import TierKind, TierStats

P = TypeVar("P")


@dataclass(slots=True)
class Slot(Generic[P]):
    """One held item. A lease keeps its slot, so a key deleted and put again is never mistaken for the old one."""

    item: Item
    payload: P  # what the tier needs to serve it
    pins: int = 0  # open leases


@dataclass(slots=True)
class Counts:
    """What happened since the tier was opened."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    damaged: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def stats(self, kind: TierKind, entries: int, used_bytes: int, capacity_bytes: int) -> TierStats:
        """These counts with what is held, frozen."""
        return TierStats(kind, entries, used_bytes, capacity_bytes, **asdict(self))


@dataclass(slots=True)
class Ledger(Generic[P]):
    """Not thread-safe: its tier holds the lock."""

    capacity_bytes: int
    policy: Policy
    used_bytes: int = 0
    _slots: dict[str, Slot[P]] = field(default_factory=dict)
    _pinned: set[str] = field(default_factory=set)
    _pinned_bytes: int = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[Slot[P]]:
        return iter(self._slots.values())

    def get(self, key: str) -> Slot[P] | None:
        """The slot of `key`, or `None`."""
        return self._slots.get(key)

    def add(self, item: Item, payload: P, now: float) -> None:
        """Enter an item for which `make_room` made room."""
        assert item.key not in self._slots
        self._slots[item.key] = Slot(item, payload)
        self.used_bytes += item.size
        self.policy.inserted(item, now)

    def remove(self, key: str) -> Slot[P] | None:
        """Take `key` out, pinned or not; its leases live on without it."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self.used_bytes -= slot.item.size
            self._mark_unpinned(slot)
            self.policy.removed(key)
        return slot

    def pin(self, slot: Slot[P]) -> None:
        """Count a lease: the slot is no victim until it is unpinned."""
        slot.pins += 1
        if slot.pins == 1:
            self._pinned.add(slot.item.key)
            self._pinned_bytes += slot.item.size

    def unpin(self, slot: Slot[P]) -> None:
        """A lease was closed; harmless for a slot that was removed meanwhile."""
        slot.pins -= 1
        if slot.pins == 0 and self._slots.get(slot.item.key) is slot:
            self._mark_unpinned(slot)

    def make_room(self, item: Item, now: float, evict: Callable[[Slot[P]], None]) -> bool:
        """Evict until `item` fits; `False`, and nothing evicted, if it never can or the policy does not want it.

        Each victim is out of the books before `evict` is called with its slot.
        """
        if item.size > self.capacity_bytes - self._pinned_bytes or not self.policy.admits(item, now):
            return False
        while self.used_bytes + item.size > self.capacity_bytes:
            key = self.policy.victim(self._pinned, now)
            assert key is not None and key not in self._pinned, "a policy must name a victim while one is unpinned"
            slot = self.remove(key)
            assert slot is not None, "a policy must only name what is held"
            evict(slot)
        return True

    def stats(self, kind: TierKind, counts: Counts) -> TierStats:
        """What is held, and what happened."""
        return counts.stats(kind, len(self), self.used_bytes, self.capacity_bytes)

    def _mark_unpinned(self, slot: Slot[P]) -> None:
        if slot.item.key in self._pinned:
            self._pinned.discard(slot.item.key)
            self._pinned_bytes -= slot.item.size
