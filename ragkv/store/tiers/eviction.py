"""Decides what leaves a full tier.

A policy is asked only when something must be evicted. Lookups do not come here, and neither does an
entry for which there is room.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragkv.errors import StoreError

from ..policies import Eviction, Item

if TYPE_CHECKING:
    from .ledger import Ledger


@dataclass(frozen=True, slots=True, eq=False)
class Evictor:
    """Makes items leave a ledger, those that its policy chooses. The caller holds the ledger's
    lock.
    """

    ledger: "Ledger[Any]"

    def shrink(self, now: float) -> None:
        """Evict what is not leased until what is held fits. Raises `StoreError` for a policy that
        names nothing to evict.
        """
        ledger = self.ledger
        while ledger.used_bytes > max(ledger.capacity_bytes, ledger.leased_bytes):
            self._evict(self._victim(now), 0)

    def make_room(self, item: Item, now: float) -> bool:
        """Evict until `item` fits. Raises as `shrink` does.

        `False` if `item` cannot fit, and then nothing was evicted, or if the policy prefers to lose
        `item` over what is held.
        """
        ledger = self.ledger
        if item.size > ledger.capacity_bytes - ledger.leased_bytes:
            return False
        self._notify_policy(item, now)
        fits = False
        try:
            fits = self._evict_for(item, now)
        finally:
            if not fits:
                ledger.cancel(item)
        return fits

    def _evict_for(self, item: Item, now: float) -> bool:
        while not self.ledger.has_room(item.size):
            eviction = self._victim(now)
            if self._is_in(item, eviction):
                if eviction.whole:
                    self._take(eviction, item.size)
                return False
            self._evict(eviction, item.size)
        return True

    def _notify_policy(self, item: Item, now: float) -> None:
        """Tell the policy that `item` is about to be held."""
        name = self.ledger.group_of(item)
        group = self.ledger.groups.get(name)
        extent = max(0 if group is None else group.extent, item.index + 1)
        size = (0 if group is None else group.size) + item.size
        self.ledger.notify_policy(lambda policy: policy.held(name, extent, size, now))

    def _victim(self, now: float) -> Eviction:
        leased = self.ledger.leased
        policy = self.ledger.informed_policy()
        eviction = policy.victim(leased, now)
        if eviction is None or eviction.group in leased:
            raise StoreError(
                f"The policy {type(policy).__name__} must evict from a group that is not leased: "
                f"{eviction}."
            )
        return eviction

    def _is_in(self, item: Item, eviction: Eviction) -> bool:
        """Whether `item` would be the tail of the chosen group, and so the first to go."""
        if eviction.group != self.ledger.group_of(item):
            return False
        group = self.ledger.groups.get(eviction.group)
        return item.index >= max(eviction.keep, 0 if group is None else group.extent)

    def _evict(self, eviction: Eviction, size: int) -> None:
        """Evict what the policy chose. Raises `StoreError` if that is nothing: the policy would
        name it again, for ever.
        """
        if not self._take(eviction, size):
            raise StoreError(f"The policy chose {eviction}, of which nothing is held.")

    def _take(self, eviction: Eviction, size: int) -> bool:
        """Evict a group's last blocks, down to `keep`, or until `size` bytes are free; whether
        there were any.
        """
        ledger = self.ledger
        group = ledger.groups.get(eviction.group)
        took = False
        while group is not None and group.slots and group.slots[-1].item.index >= eviction.keep:
            if not eviction.whole and ledger.has_room(size):
                break
            ledger.evict(group.slots[-1])
            took = True
        return took
