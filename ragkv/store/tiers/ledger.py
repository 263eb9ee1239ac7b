"""What the tiers of this machine share: a ledger of the items they hold, behind one lock.

The ledger knows how many bytes items take and which are pinned; `eviction.py` says which of them
leave. It holds metadata only: the tier moves the bytes. Two invariants: `used_bytes` is the sum of
the held items' sizes and never above the capacity, and a pinned item is never evicted.
"""

import threading
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from ..entry import EntryKey
from ..policies import Item, Policy, TurnSize
from .base import Tier
from .eviction import Eviction
from .stats import Counts, TierStats

P = TypeVar("P")

MOST_NEWS = 1024  # are kept for a policy that is asked nothing


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


def unit_of(item: Item) -> str:
    """The group that policies decide by: its conversation, or the chunk itself."""
    return item.group or item.key.digest


class Ledger(Eviction[P]):
    """Not thread-safe: its tier holds the lock.

    What happens is noted, and the policy is told of it, in order, before it is asked anything.
    """

    def __init__(
        self, capacity_bytes: int, policy: Policy, on_evict: Callable[[Slot[P]], None]
    ) -> None:
        """`on_evict` is called after a slot has left the ledger."""
        self.capacity_bytes = capacity_bytes
        self.on_evict = on_evict
        self.used_bytes = 0
        self._policy = policy
        self._news: list[Callable[[Policy], None]] = []  # of which the policy knows nothing yet
        self._slots: dict[EntryKey, Slot[P]] = {}
        self._groups: dict[str, Group[P]] = {}
        self._pinned: set[str] = set()  # groups
        self._pinned_bytes = 0  # of everything in those groups

    @property
    def policy(self) -> Policy:
        """The policy, which knows all that happened."""
        news = self._news
        self._news = []
        for tell in news:
            tell(self._policy)
        return self._policy

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot[P]]:
        return iter(self._slots.values())

    def get(self, key: EntryKey) -> Slot[P] | None:
        """The slot of `key`, or `None`."""
        return self._slots.get(key)

    def used(self, slot: Slot[P], now: float) -> None:
        """Note for the policy that a held slot was leased."""
        name = unit_of(slot.item)
        self._note(lambda policy: policy.used(name, now))

    def served(self, turn: TurnSize, now: float) -> None:
        """Note for the policy that a conversation's turn was served; it may trim."""
        self._note(lambda policy: policy.served(turn))
        if self._policy.trims_early:
            self.trim(0, now)

    def make_space(self, item: Item, now: float) -> bool:
        """Evict until `item` fits, and announce it to the policy; `add` or `cancel` must follow.

        `False` if `item` cannot fit, and then nothing was evicted, or if the
        policy prefers to lose `item` over what is held.
        """
        name = unit_of(item)
        group = self._groups.get(name) or Group()
        if item.size > self.capacity_bytes - self._pinned_bytes:
            return False
        extent = max(group.extent, item.index + 1)
        size = group.size + item.size
        self._note(lambda policy: policy.held(name, extent, size, now))
        if self._fits(item.size) and not self._policy.trims_early:
            return True
        wanted = self.evict_for(name, item.index, item.size, now)
        if not wanted:
            self.cancel(item, now)
        return wanted

    def add(self, item: Item, payload: P, now: float) -> None:
        """Add an item after `make_space` made space for it."""
        assert item.key not in self._slots
        slot = self._slots[item.key] = Slot(item, payload)
        name = unit_of(item)
        group = self._groups.setdefault(name, Group())
        insort(group.slots, slot, key=lambda other: other.item.index)
        group.size += item.size
        if group.pins:
            self._pinned_bytes += item.size
        self.used_bytes += item.size
        # again: the group may have changed since `make_space`
        self._report(name, group, now)

    def cancel(self, item: Item, now: float) -> None:
        """Tell the policy that an announced item will not be added."""
        name = unit_of(item)
        self._report(name, self._groups.get(name) or Group(), now)

    def remove(self, key: EntryKey, now: float = 0.0) -> Slot[P] | None:
        """Remove and return the slot of `key`, pinned or not; its leases stay valid."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        name = unit_of(slot.item)
        group = self._groups[name]
        group.slots.remove(slot)
        group.size -= slot.item.size
        self.used_bytes -= slot.item.size
        if group.pins:
            self._pinned_bytes -= slot.item.size
            self._unpin_group(name, slot.pins)
        if not group.slots:
            del self._groups[name]
        self._report(name, group, now)
        return slot

    def pin(self, slot: Slot[P]) -> None:
        """Count a lease: nothing of the slot's group is evicted until `unpin`."""
        slot.pins += 1
        name = unit_of(slot.item)
        group = self._groups[name]
        group.pins += 1
        if group.pins == 1:
            self._pinned.add(name)
            self._pinned_bytes += group.size

    def unpin(self, slot: Slot[P]) -> None:
        """Count a closed lease. Harmless for a slot that was removed meanwhile."""
        slot.pins -= 1
        if self._slots.get(slot.item.key) is slot:
            self._unpin_group(unit_of(slot.item), 1)

    def _fits(self, size: int) -> bool:
        return self.used_bytes + size <= self.capacity_bytes

    def _report(self, name: str, group: Group[P], now: float) -> None:
        extent = group.extent
        size = group.size
        self._note(lambda policy: policy.held(name, extent, size, now))

    def _note(self, news: Callable[[Policy], None]) -> None:
        self._news.append(news)
        if len(self._news) > MOST_NEWS:
            _ = self.policy

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
