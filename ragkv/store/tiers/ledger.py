"""The ledger of a local tier: the items that it holds, and which of them are leased.

The ledger knows how many bytes items take, counts what happens to them, and collects the news for
its policy. `eviction.py` evicts items. Both hold metadata only; the tier has the bytes. There are
two invariants. `used_bytes` is the sum of the held items' sizes and never above the capacity. A
leased item is never evicted.
"""

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from ragkv.errors import EntryDamagedError, EntryUnreachableError

from ..entry import EntryKey
from ..policies import Item, Policy
from .eviction import Evictor
from .stats import Counts, TierStats

log = logging.getLogger(__name__)

P = TypeVar("P")
L = TypeVar("L")

MOST_NEWS = 1024  # The policy is told at the latest when so many pieces of news wait.


@dataclass(slots=True, eq=False)
class Slot(Generic[P]):
    """One held item. A lease keeps its slot: a key deleted and put again has another one."""

    item: Item
    payload: P  # what the tier needs to serve it
    leases: int = 0  # open ones


@dataclass(slots=True)
class Group(Generic[P]):
    """The held blocks of one conversation, or one chunk. A policy decides by groups."""

    slots: list[Slot[P]] = field(default_factory=list)  # ordered by index
    size: int = 0
    leases: int = 0  # open ones of all its items

    @property
    def extent(self) -> int:
        """The number of the last held block, plus one."""
        return self.slots[-1].item.index + 1 if self.slots else 0


class Ledger(Generic[P]):
    """What a tier holds. A caller holds `lock` to make several calls in one step."""

    def __init__(
        self,
        capacity_bytes: int,
        policy: Policy,
        delete: Callable[[P], object] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`delete` is given the payload of an item that was evicted, or dropped as damaged."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.groups: dict[str, Group[P]] = {}  # by name
        self.leased: set[str] = set()  # names of groups
        self.leased_bytes = 0  # of everything in those groups
        self.counts = Counts()
        # re-entrant: garbage collection may close an abandoned lease while it is held
        self.lock = threading.RLock()
        self._slots: dict[EntryKey, Slot[P]] = {}
        self._evictor = Evictor(self)
        self._policy = policy
        self._news: list[Callable[[Policy], object]] = []
        self._delete = delete
        self._clock = clock

    def __contains__(self, key: object) -> bool:
        with self.lock:
            return key in self._slots

    def get(self, key: EntryKey) -> Slot[P] | None:
        """The slot of `key`, or `None`."""
        with self.lock:
            return self._slots.get(key)

    def slots(self) -> list[Slot[P]]:
        """All slots, in no particular order."""
        with self.lock:
            return list(self._slots.values())

    def stats(self, kind: str) -> TierStats:
        """What a tier of that kind holds, and its counts."""
        with self.lock:
            held = len(self._slots), self.used_bytes, self.capacity_bytes
            return TierStats(kind, *held, **asdict(self.counts))

    def block_keys(self) -> list[EntryKey]:
        """The keys of the blocks of conversations."""
        return [slot.item.key for slot in self.slots() if slot.item.group]

    # Leases

    def lease(self, key: EntryKey, open_slot: Callable[[Slot[P]], L | None]) -> L | None:
        """What `open_slot` makes of the slot of `key`: a lease, which ends with `release`, or
        `None` if it cannot. Counted as a hit or a miss.
        """
        with self.lock:
            slot = self._slots.get(key)
            if slot is None:
                self.counts.misses += 1
                return None
            group = self.groups[self.group_of(slot.item)]
            if not group.leases:
                self.leased.add(self.group_of(slot.item))
                self.leased_bytes += group.size
            group.leases += 1
            slot.leases += 1
        lease = None
        try:
            lease = open_slot(slot)
        finally:  # whatever was raised, nothing stays leased without a lease
            with self.lock:
                if lease is None:
                    self.counts.misses += 1
                    self.release(slot)
                else:
                    self.counts.hits += 1
                    name = self.group_of(slot.item)
                    now = self._clock()
                    self.notify_policy(lambda policy: policy.used(name, now))
        return lease

    def release(self, slot: Slot[P]) -> None:
        """A lease was closed. Harmless for a slot that was removed meanwhile."""
        with self.lock:
            slot.leases -= 1
            if self._slots.get(slot.item.key) is slot:
                self._release_group(self.group_of(slot.item), 1)

    def count_read(self, size_bytes: int) -> None:
        """A lease read so many bytes."""
        with self.lock:
            self.counts.read_bytes += size_bytes

    # Changes

    def has_room(self, size: int) -> bool:
        """Whether so many bytes are free."""
        return self.used_bytes + size <= self.capacity_bytes

    def make_room(self, item: Item, used: float | None = None) -> bool:
        """Whether `item` has room, after others were evicted if need be. `add` or `cancel` must
        follow, before anything else takes that room. `used`: when it was used, if not now.
        """
        with self.lock:
            return self.has_room(item.size) or self._evictor.make_room(item, self._time(used))

    def add(self, item: Item, payload: P, used: float | None = None) -> None:
        """Add an item that has room. `used`: as for `make_room`."""
        with self.lock:
            assert item.key not in self._slots
            slot = self._slots[item.key] = Slot(item, payload)
            group = self.groups.setdefault(self.group_of(item), Group())
            insort(group.slots, slot, key=lambda other: other.item.index)
            group.size += item.size
            if group.leases:
                self.leased_bytes += item.size
            self.used_bytes += item.size
            self._report(item, used)

    def cancel(self, item: Item) -> None:
        """An item for which room was made is not added."""
        with self.lock:
            self._report(item)

    def remove(self, key: EntryKey) -> Slot[P] | None:
        """Remove and return the slot of `key`, leased or not; its leases stay valid."""
        with self.lock:
            slot = self._slots.pop(key, None)
            if slot is None:
                return None
            name = self.group_of(slot.item)
            group = self.groups[name]
            group.slots.remove(slot)
            group.size -= slot.item.size
            self.used_bytes -= slot.item.size
            if group.leases:
                self.leased_bytes -= slot.item.size
                self._release_group(name, slot.leases)
            if not group.slots:
                del self.groups[name]
            self._report(slot.item)
        return slot

    def evict(self, slot: Slot[P]) -> None:
        """Remove an item to make room. The caller holds `lock`."""
        self.remove(slot.item.key)
        self.counts.evictions += 1
        self._delete(slot.payload)

    def drop_damaged(self, slot: Slot[P], why: EntryDamagedError) -> None:
        """Drop an item that is damaged. One that could not be read now stays."""
        with self.lock:
            if self._slots.get(slot.item.key) is not slot:
                return  # it was deleted, evicted or dropped meanwhile
            log.warning("%s", why)
            if not isinstance(why, EntryUnreachableError):
                self.counts.damaged += 1
                self.remove(slot.item.key)
                self._delete(slot.payload)

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity; what does not fit any more and is not leased is evicted."""
        with self.lock:
            self.capacity_bytes = capacity_bytes
            self._evictor.shrink(self._clock())

    def close(self) -> None:
        """Hold nothing any more, and take nothing. Open leases stay valid."""
        with self.lock:
            self.capacity_bytes = self.used_bytes = self.leased_bytes = 0
            self._slots.clear()
            self.groups.clear()
            self.leased.clear()

    # Its policy

    @staticmethod
    def group_of(item: Item) -> str:
        """The name of the group that policies decide by: its conversation, or the chunk itself."""
        return item.group or item.key.digest

    def notify_policy(self, news: Callable[[Policy], object]) -> None:
        """Let `news` tell the policy something, in order, before the policy is asked anything."""
        with self.lock:
            self._news.append(news)
            if len(self._news) > MOST_NEWS:
                self.informed_policy()

    def informed_policy(self) -> Policy:
        """The policy, which was told all that happened. The caller holds `lock` while it asks."""
        untold = self._news
        self._news = []
        for news in untold:
            try:
                news(self._policy)
            except Exception:  # it keeps no other news from the policy
                log.exception("A policy failed; it goes on without one piece of news.")
        return self._policy

    def _report(self, item: Item, used: float | None = None) -> None:
        """Tell the policy what is held of the group of `item` now."""
        name = self.group_of(item)
        group = self.groups.get(name) or Group()
        extent = group.extent  # now, not when the policy is told
        size = group.size
        now = self._time(used)
        self.notify_policy(lambda policy: policy.held(name, extent, size, now))

    def _time(self, used: float | None) -> float:
        return self._clock() if used is None else used

    def _release_group(self, name: str, leases: int) -> None:
        group = self.groups[name]
        group.leases -= leases
        if leases and not group.leases:
            self.leased.discard(name)
            self.leased_bytes -= group.size
