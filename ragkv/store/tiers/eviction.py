"""Decides what leaves a full tier.

A policy is asked only when something must be evicted. Lookups do not come here, and neither does an
entry for which there is room.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..policies import Cut, Item

if TYPE_CHECKING:
    from .ledger import Ledger


@dataclass(frozen=True, slots=True, eq=False)
class Eviction:
    """Makes items leave a ledger, those that its policy chooses. The caller holds the ledger's
    lock.
    """

    ledger: "Ledger[Any]"

    def shrink(self, now: float) -> None:
        """Evict what is not leased until what is held fits."""
        ledger = self.ledger
        while ledger.used_bytes > max(ledger.capacity_bytes, ledger.leased_bytes):
            self._take(self._victim(now), 0)

    def make_room(self, item: Item, now: float) -> bool:
        """Evict until `item` fits.

        `False` if `item` cannot fit, and then nothing was evicted, or if the policy prefers to lose
        `item` over what is held.
        """
        ledger = self.ledger
        if item.size > ledger.capacity_bytes - ledger.leased_bytes:
            return False
        self._announce(item, now)
        while not ledger.has_room(item.size):
            cut = self._victim(now)
            is_refused = self._is_in(item, cut)
            if cut.whole or not is_refused:
                self._take(cut, item.size)
            if is_refused:
                ledger.cancel(item)
                return False
        return True

    def _announce(self, item: Item, now: float) -> None:
        """Tell the policy that `item` is about to be held."""
        name = self.ledger.group_of(item)
        group = self.ledger.groups.get(name)
        extent = max(0 if group is None else group.extent, item.index + 1)
        size = (0 if group is None else group.size) + item.size
        self.ledger.tell(lambda policy: policy.held(name, extent, size, now))

    def _victim(self, now: float) -> Cut:
        leased = self.ledger.leased
        cut = self.ledger.informed_policy().victim(leased, now)
        assert cut is not None and cut.group not in leased, (
            "a policy must cut while a group is not leased"
        )
        return cut

    def _is_in(self, item: Item, cut: Cut) -> bool:
        """Whether `item` would be the tail of the group that is cut, and so the first to go."""
        if cut.group != self.ledger.group_of(item):
            return False
        group = self.ledger.groups.get(cut.group)
        return item.index >= max(cut.keep, 0 if group is None else group.extent)

    def _take(self, cut: Cut, size: int) -> None:
        """Evict a group's last blocks, down to the cut, or until `size` bytes are free."""
        ledger = self.ledger
        group = ledger.groups.get(cut.group)
        while group is not None and group.slots and group.slots[-1].item.index >= cut.keep:
            if not cut.whole and ledger.has_room(size):
                return
            slot = group.slots[-1]
            ledger.remove(slot.item.key)
            ledger.counts.evictions += 1
            ledger.discard(slot.payload)
