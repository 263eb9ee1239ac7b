"""The ledger of a local tier: the items that it holds, behind one lock.

The ledger knows how many bytes items take and which are pinned. The `News` hold what its policy
must be told. `eviction.py` evicts items. All three hold metadata only; the tier moves the bytes.
There are two invariants. `used_bytes` is the sum of the held items' sizes and never above the
capacity. A pinned item is never evicted.
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


class News:
    """What happened since a policy was last asked: it is told of it, in order, before it is asked
    anything. Not thread-safe: the tier holds the lock.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy_trims_early = policy.trims_early
        self._policy = policy
        self._untold: list[Callable[[Policy], object]] = []

    def note(self, tell: Callable[[Policy], object]) -> None:
        """The policy is told this before it is asked."""
        self._untold.append(tell)
        if len(self._untold) > MOST_NEWS:
            self.tell_all()

    def tell_all(self) -> Policy:
        """Tell the policy all that happened; the policy, which can be asked now."""
        untold = self._untold
        self._untold = []
        for tell in untold:
            tell(self._policy)
        return self._policy


class Ledger(Generic[P]):
    """What a tier holds, and which of it is pinned. Not thread-safe: its tier holds the lock."""

    def __init__(self, capacity_bytes: int, news: News) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.groups: dict[str, Group[P]] = {}  # by name
        self.pinned: set[str] = set()  # names of groups
        self.pinned_bytes = 0  # of everything in those groups
        self._news = news
        self._slots: dict[EntryKey, Slot[P]] = {}

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
        group = self.group_of(slot.item)
        self._news.note(lambda policy: policy.used(group, now))

    @staticmethod
    def group_of(item: Item) -> str:
        """The name of the group that policies decide by: its conversation, or the chunk itself."""
        return item.group or item.key.digest

    def has_room(self, size: int) -> bool:
        """Whether so many bytes are free."""
        return self.used_bytes + size <= self.capacity_bytes

    def announce(self, item: Item, now: float) -> None:
        """Note for the policy that `item` is about to be held; `add` or `cancel` must follow."""
        name = self.group_of(item)
        group = self.groups.get(name) or Group()
        extent = max(group.extent, item.index + 1)
        size = group.size + item.size  # now, not when the policy is told
        self._news.note(lambda policy: policy.held(name, extent, size, now))

    def add(self, item: Item, payload: P, now: float) -> None:
        """Add an announced item for which there is room."""
        assert item.key not in self._slots
        slot = self._slots[item.key] = Slot(item, payload)
        name = self.group_of(item)
        group = self.groups.setdefault(name, Group())
        insort(group.slots, slot, key=lambda other: other.item.index)
        group.size += item.size
        if group.pins:
            self.pinned_bytes += item.size
        self.used_bytes += item.size
        # again: the group may have changed since `announce`
        self._report(name, group, now)

    def cancel(self, item: Item, now: float) -> None:
        """Tell the policy that an announced item will not be added."""
        name = self.group_of(item)
        self._report(name, self.groups.get(name) or Group(), now)

    def remove(self, key: EntryKey, now: float = 0.0) -> Slot[P] | None:
        """Remove and return the slot of `key`, pinned or not; its leases stay valid."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        name = self.group_of(slot.item)
        group = self.groups[name]
        group.slots.remove(slot)
        group.size -= slot.item.size
        self.used_bytes -= slot.item.size
        if group.pins:
            self.pinned_bytes -= slot.item.size
            self._unpin_group(name, slot.pins)
        if not group.slots:
            del self.groups[name]
        self._report(name, group, now)
        return slot

    def pin(self, slot: Slot[P]) -> None:
        """Count a lease: nothing of the slot's group is evicted until `unpin`."""
        slot.pins += 1
        name = self.group_of(slot.item)
        group = self.groups[name]
        group.pins += 1
        if group.pins == 1:
            self.pinned.add(name)
            self.pinned_bytes += group.size

    def unpin(self, slot: Slot[P]) -> None:
        """Count a closed lease. Harmless for a slot that was removed meanwhile."""
        slot.pins -= 1
        if self._slots.get(slot.item.key) is slot:
            self._unpin_group(self.group_of(slot.item), 1)

    def _report(self, name: str, group: Group[P], now: float) -> None:
        extent = group.extent  # now, not when the policy is told
        size = group.size
        self._news.note(lambda policy: policy.held(name, extent, size, now))

    def _unpin_group(self, name: str, leases: int) -> None:
        group = self.groups[name]
        group.pins -= leases
        if leases and not group.pins:
            self.pinned.discard(name)
            self.pinned_bytes -= group.size


class LocalTier(Tier, Generic[P]):
    """A tier of this machine, which evicts by its own policy."""

    def __init__(self, capacity_bytes: int, policy: Policy, clock: Callable[[], float]) -> None:
        self._news = News(policy)
        self._ledger: Ledger[P] = Ledger(capacity_bytes, self._news)
        self._eviction: Eviction[P] = Eviction(self._ledger, self._news, self._evict)
        self._counts = Counts()
        self._clock = clock
        # re-entrant: garbage collection may close an abandoned lease while it is held
        self._lock = threading.RLock()

    def tell(self, action: Callable[[Policy], object]) -> None:
        with self._lock:
            action(self._news.tell_all())

    def served(self, turn: TurnSize) -> None:
        with self._lock:
            self._news.note(lambda policy: policy.served(turn))
            if self._news.policy_trims_early:
                self._eviction.trim(self._clock())

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

    def _make_space(self, item: Item, now: float) -> bool:
        """Make room for `item`, announced: `Ledger.add` or `cancel` must follow; else `False`."""
        if self._news.policy_trims_early or not self._ledger.has_room(item.size):
            return self._eviction.make_space(item, now)
        self._ledger.announce(item, now)
        return True

    def _evict(self, slot: Slot[P]) -> None:
        self._counts.evictions += 1

    def _unpin(self, slot: Slot[P]) -> None:
        with self._lock:
            self._ledger.unpin(slot)

    def _count_read(self, size_bytes: int) -> None:
        with self._lock:
            self._counts.read_bytes += size_bytes
