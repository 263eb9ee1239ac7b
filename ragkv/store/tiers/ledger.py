"""What the tiers of this machine share: a ledger of the items they hold, behind one lock.

The ledger knows how many bytes items take, which are pinned, and which to evict. It holds metadata
only: the tier moves the bytes. Two invariants: `used_bytes` is the sum of the held items' sizes and
never above the capacity, and a pinned item is never evicted.
"""

import threading
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from ..entry import EntryKey
from ..policies import Cut, Item, Policy, TurnSize
from .base import Tier
from .stats import Counts, TierStats

P = TypeVar("P")


@dataclass(slots=True, eq=False)
class Slot(Generic[P]):
    """One held item. A lease keeps its slot: a key deleted and put again has another one."""

    item: Item
    payload: P  # what the tier needs to serve it
    pins: int = 0  # open leases


@dataclass(slots=True)
class Group(Generic[P]):
    """The held blocks of one conversation, or one chunk. A policy decides by groups."""

    slots: list[Slot[P]] = field(default_factory=list)  # ordered by index
    size: int = 0
    pins: int = 0  # open leases of all its items

    @property
    def extent(self) -> int:
        """The number of the last held block, plus one."""
        return self.slots[-1].item.index + 1 if self.slots else 0


@dataclass(slots=True)
class Ledger(Generic[P]):
    """Not thread-safe: its tier holds the lock."""

    capacity_bytes: int
    policy: Policy
    on_evict: Callable[[Slot[P]], None]  # called after the slot has left the ledger
    used_bytes: int = 0
    _slots: dict[EntryKey, Slot[P]] = field(default_factory=dict)
    _groups: dict[str, Group[P]] = field(default_factory=dict)
    _pinned: set[str] = field(default_factory=set)  # groups
    _pinned_bytes: int = 0  # of everything in those groups

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot[P]]:
        return iter(self._slots.values())

    def get(self, key: EntryKey) -> Slot[P] | None:
        """The slot of `key`, or `None`."""
        return self._slots.get(key)

    def served(self, turn: TurnSize, now: float) -> None:
        """Tell the policy that a conversation's turn was served; it may trim."""
        self.policy.served(turn)
        self._trim(0, None, now)

    def used(self, slot: Slot[P], now: float) -> None:
        """Tell the policy that a held slot was leased."""
        self.policy.used(slot.item.unit, now)

    def make_space(self, item: Item, now: float) -> bool:
        """Evict until `item` fits, and announce it to the policy; `add` or `cancel` must follow.

        `False` if `item` cannot fit, and then nothing was evicted, or if the
        policy prefers to lose `item` over what is held.
        """
        name = item.unit
        group = self._groups.get(name) or Group()
        if item.size > self.capacity_bytes - self._pinned_bytes:
            return False
        self.policy.held(name, max(group.extent, item.index + 1), group.size + item.size, now)
        wanted = self._trim(item.size, item, now)
        while wanted and not self._fits(item.size):
            wanted = self._take(self._victim(now), item.size, item, now)
        if not wanted:
            self.cancel(item, now)
        return wanted

    def resize(self, capacity_bytes: int, now: float) -> None:
        """Change the capacity, and evict what does not fit any more and is not pinned."""
        self.capacity_bytes = capacity_bytes
        while self.used_bytes > max(capacity_bytes, self._pinned_bytes):
            self._take(self._victim(now), 0, None, now)

    def add(self, item: Item, payload: P, now: float) -> None:
        """Add an item after `make_space` made space for it."""
        assert item.key not in self._slots
        slot = self._slots[item.key] = Slot(item, payload)
        group = self._groups.setdefault(slot.item.unit, Group())
        insort(group.slots, slot, key=lambda other: other.item.index)
        group.size += item.size
        if group.pins:
            self._pinned_bytes += item.size
        self.used_bytes += item.size
        self._report(
            slot.item.unit, group, now
        )  # again: the group may have changed since `make_space`

    def cancel(self, item: Item, now: float) -> None:
        """Tell the policy that an announced item will not be added."""
        name = item.unit
        self._report(name, self._groups.get(name) or Group(), now)

    def remove(self, key: EntryKey, now: float = 0.0) -> Slot[P] | None:
        """Remove and return the slot of `key`, pinned or not; its leases stay valid."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        group = self._groups[slot.item.unit]
        group.slots.remove(slot)
        group.size -= slot.item.size
        self.used_bytes -= slot.item.size
        if group.pins:
            self._pinned_bytes -= slot.item.size
            self._unpin_group(slot.item.unit, slot.pins)
        if not group.slots:
            del self._groups[slot.item.unit]
        self._report(slot.item.unit, group, now)
        return slot

    def pin(self, slot: Slot[P]) -> None:
        """Count a lease: nothing of the slot's group is evicted until `unpin`."""
        slot.pins += 1
        name = slot.item.unit
        group = self._groups[name]
        group.pins += 1
        if group.pins == 1:
            self._pinned.add(name)
            self._pinned_bytes += group.size

    def unpin(self, slot: Slot[P]) -> None:
        """Count a closed lease. Harmless for a slot that was removed meanwhile."""
        slot.pins -= 1
        if self._slots.get(slot.item.key) is slot:
            self._unpin_group(slot.item.unit, 1)

    def _fits(self, size: int) -> bool:
        return self.used_bytes + size <= self.capacity_bytes

    def _victim(self, now: float) -> Cut:
        cut = self.policy.victim(self._pinned, now)
        assert cut is not None and cut.group not in self._pinned, (
            "a policy must cut while a group is unpinned"
        )
        return cut

    def _trim(self, need: int, item: Item | None, now: float) -> bool:
        """Take the cuts that the policy wants whole; whether `item` itself is not among them."""
        cuts = list(self.policy.trims(not self._fits(need), now))
        wanted = [self._take(cut._replace(whole=True), need, item, now) for cut in cuts]
        return all(wanted)

    def _take(self, cut: Cut, need: int, item: Item | None, now: float) -> bool:
        """Evict the tail of a group down to the cut, or until `need` bytes are free; whether `item`
        is not part of it.

        Evicts nothing of a pinned group.
        """
        group = self._groups.get(cut.group) or Group()
        is_item = (
            item is not None
            and cut.group == item.unit
            and item.index >= max(cut.keep, group.extent)
        )
        if cut.group in self._pinned or (is_item and not cut.whole):
            # `item` would be the tail of its own group, so it is the first to go
            return not is_item
        while group.slots and group.slots[-1].item.index >= cut.keep:
            if not cut.whole and self._fits(need):
                break
            slot = self.remove(group.slots[-1].item.key, now)
            assert slot is not None
            self.on_evict(slot)
        return not is_item

    def _report(self, name: str, group: Group[P], now: float) -> None:
        self.policy.held(name, group.extent, group.size, now)

    def _unpin_group(self, name: str, leases: int) -> None:
        group = self._groups[name]
        group.pins -= leases
        if leases and not group.pins:
            self._pinned.discard(name)
            self._pinned_bytes -= group.size


class LocalTier(Tier, Generic[P]):
    """A tier of this machine, which evicts by its own policy."""

    def __init__(self, capacity_bytes: int, policy: Policy, clock: Callable[[], float]) -> None:
        self._ledger: Ledger[P] = Ledger(capacity_bytes, policy, self._evict)
        self._counts = Counts()
        self._clock = clock
        # re-entrant: garbage collection may close an abandoned lease while it is held
        self._lock = threading.RLock()

    def tell(self, action: Callable[[Policy], object]) -> None:
        with self._lock:
            action(self._ledger.policy)

    def served(self, turn: TurnSize) -> None:
        with self._lock:
            self._ledger.served(turn, self._clock())

    def contains(self, key: EntryKey) -> bool:
        with self._lock:
            return key in self._ledger

    @property
    def leases(self) -> int:
        with self._lock:
            return sum(slot.pins for slot in self._ledger)

    def block_keys(self) -> list[EntryKey]:
        with self._lock:
            items = [slot.item for slot in self._ledger]
        return [item.key for item in items if item.group]

    def stats(self) -> TierStats:
        with self._lock:
            ledger = self._ledger
            return TierStats(
                self.kind,
                len(ledger),
                ledger.used_bytes,
                ledger.capacity_bytes,
                **asdict(self._counts),
            )

    def _evict(self, slot: Slot[P]) -> None:
        self._counts.evictions += 1

    def _unpin(self, slot: Slot[P]) -> None:
        with self._lock:
            self._ledger.unpin(slot)

    def _count_read(self, size_bytes: int) -> None:
        with self._lock:
            self._counts.read_bytes += size_bytes
