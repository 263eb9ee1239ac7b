"""The books of one tier: who is held, how many bytes that is, who is pinned, and who goes when room is needed.

Metadata only; the tier holds the lock and moves the bytes. The invariants: `used_bytes` is the sum of the held items'
sizes and never above the capacity, and a pinned item is never a victim.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from ..policies import Cut, Item, Policy, Turn
from .base import TierKind, TierStats

P = TypeVar("P")


@dataclass(slots=True, eq=False)
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
class Group(Generic[P]):
    """What is held of one conversation, or a chunk that stands alone. A policy decides by groups."""

    slots: list[Slot[P]] = field(default_factory=list)  # by index, the tail last
    size: int = 0
    pins: int = 0  # open leases of any of them


@dataclass(slots=True)
class Ledger(Generic[P]):
    """Not thread-safe: its tier holds the lock."""

    capacity_bytes: int
    policy: Policy
    used_bytes: int = 0
    _slots: dict[str, Slot[P]] = field(default_factory=dict)
    _groups: dict[str, Group[P]] = field(default_factory=dict)
    _pinned: set[str] = field(default_factory=set)  # groups
    _pinned_bytes: int = 0  # of everything in those groups

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[Slot[P]]:
        return iter(self._slots.values())

    def get(self, key: str) -> Slot[P] | None:
        """The slot of `key`, or `None`."""
        return self._slots.get(key)

    def served(self, turn: Turn, now: float, evict: Callable[[Slot[P]], None]) -> None:
        """A conversation's turn was served; the policy may trim."""
        self.policy.served(turn)
        self._trim(0, None, self._pinned, now, evict)

    def used(self, slot: Slot[P], now: float) -> None:
        """A slot that is held was leased."""
        self.policy.used(group_of(slot.item), now)

    def queued(self, groups: Sequence[str]) -> None:
        """A request that will read these groups waits from now on."""
        for group in groups:
            self.policy.queued(group)

    def left(self, places: Sequence[tuple[str, int]]) -> None:
        """A request waits no longer. Of each group it was to read: how many before it wait for the same."""
        for group, place in places:
            self.policy.left(group, place)

    def make_room(
        self, item: Item, now: float, evict: Callable[[Slot[P]], None], spared: Set[str] = frozenset()
    ) -> bool:
        """Evict until `item` fits, and tell the policy of it; `add` or `cancel` must follow.

        `False` if it never can fit, with nothing evicted, or if the policy would rather lose `item` than what is left.
        Nothing of the groups `spared` goes. Each victim is out of the books before `evict` is called with its slot.
        """
        name = group_of(item)
        group = self._groups.get(name) or Group()
        kept, kept_bytes = self._kept(spared)
        if item.size > self.capacity_bytes - kept_bytes:
            return False
        self.policy.held(name, max(_extent(group), item.index + 1), group.size + item.size, now)
        wanted = self._trim(item.size, item, kept, now, evict)
        while wanted and self.used_bytes + item.size > self.capacity_bytes:
            cut = self.policy.victim(kept, now)
            assert cut is not None and cut.group not in kept, "a policy must cut while a group is unpinned"
            wanted = self._take(cut, item.size, item, kept, now, evict)
        if not wanted:
            self.cancel(item, now)
        return wanted

    def free(self, size: int, now: float, evict: Callable[[Slot[P]], None]) -> None:
        """Evict as the policy says until `size` bytes are free, or everything left is pinned."""
        while self.used_bytes + size > self.capacity_bytes and self.used_bytes > self._pinned_bytes:
            cut = self.policy.victim(self._pinned, now)
            assert cut is not None and cut.group not in self._pinned, "a policy must cut while a group is unpinned"
            self._take(cut, size, None, self._pinned, now, evict)

    def add(self, item: Item, payload: P, now: float) -> None:
        """Enter an item for which `make_room` made room."""
        assert item.key not in self._slots
        slot = self._slots[item.key] = Slot(item, payload)
        name = group_of(item)
        group = self._groups.setdefault(name, Group())
        insort(group.slots, slot, key=lambda other: other.item.index)
        group.size += item.size
        if group.pins:
            self._pinned_bytes += item.size
        self.used_bytes += item.size
        self._tell(name, group, now)  # again: the group may have changed since room was made

    def cancel(self, item: Item, now: float) -> None:
        """Tell the policy that an item for which `make_room` made room does not come."""
        name = group_of(item)
        self._tell(name, self._groups.get(name) or Group(), now)

    def remove(self, key: str, now: float = 0.0) -> Slot[P] | None:
        """Take `key` out, pinned or not; its leases live on without it."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        name = group_of(slot.item)
        group = self._groups[name]
        group.slots.remove(slot)
        group.size -= slot.item.size
        self.used_bytes -= slot.item.size
        if group.pins:
            self._pinned_bytes -= slot.item.size
            self._unpin_group(name, group, slot.pins)
        if not group.slots:
            del self._groups[name]
        self._tell(name, group, now)
        return slot

    def pin(self, slot: Slot[P]) -> None:
        """Count a lease: nothing of the slot's group is a victim until it is unpinned."""
        slot.pins += 1
        name = group_of(slot.item)
        group = self._groups[name]
        group.pins += 1
        if group.pins == 1:
            self._pinned.add(name)
            self._pinned_bytes += group.size

    def unpin(self, slot: Slot[P]) -> None:
        """A lease was closed; harmless for a slot that was removed meanwhile."""
        slot.pins -= 1
        if self._slots.get(slot.item.key) is slot:
            name = group_of(slot.item)
            self._unpin_group(name, self._groups[name], 1)

    def stats(self, kind: TierKind, counts: Counts) -> TierStats:
        """What is held, and what happened."""
        return counts.stats(kind, len(self), self.used_bytes, self.capacity_bytes)

    def _kept(self, spared: Set[str]) -> tuple[Set[str], int]:
        """The groups that may not be cut, and their bytes."""
        if not spared:
            return self._pinned, self._pinned_bytes
        more = [name for name in spared if name in self._groups and name not in self._pinned]
        return self._pinned.union(spared), self._pinned_bytes + sum(self._groups[name].size for name in more)

    def _trim(self, need: int, item: Item | None, kept: Set[str], now: float, evict: Callable[[Slot[P]], None]) -> bool:
        """Take the cuts the policy wants whole; whether `item` itself is not among them."""
        overflows = self.used_bytes + need > self.capacity_bytes
        cuts = list(self.policy.trims(overflows, now))
        wanted = [self._take(cut._replace(whole=True), need, item, kept, now, evict) for cut in cuts]
        return all(wanted)

    def _take(
        self,
        cut: Cut,
        need: int,
        item: Item | None,
        kept: Set[str],
        now: float,
        evict: Callable[[Slot[P]], None],
    ) -> bool:
        """Drop the tail of a group down to the cut, or until `need` bytes are free; whether `item` is no part of it.

        Nothing of the groups `kept` goes.
        """
        group = self._groups.get(cut.group) or Group()
        is_item = item is not None and cut.group == group_of(item) and item.index >= max(cut.keep, _extent(group))
        if cut.group in kept or (is_item and not cut.whole):
            return not is_item  # the tail that goes first is the one that comes
        while group.slots and group.slots[-1].item.index >= cut.keep:
            if not cut.whole and self.used_bytes + need <= self.capacity_bytes:
                break
            slot = self.remove(group.slots[-1].item.key, now)
            assert slot is not None
            evict(slot)
        return not is_item

    def _tell(self, name: str, group: Group[P], now: float) -> None:
        self.policy.held(name, _extent(group), group.size, now)

    def _unpin_group(self, name: str, group: Group[P], leases: int) -> None:
        if not leases:
            return
        group.pins -= leases
        if not group.pins:
            self._pinned.discard(name)
            self._pinned_bytes -= group.size


def group_of(item: Item) -> str:
    """The group an item belongs to: a chunk that stands alone is its own."""
    return item.group or item.key


def _extent(group: Group[P]) -> int:
    """Blocks up to the last one held."""
    return group.slots[-1].item.index + 1 if group.slots else 0
