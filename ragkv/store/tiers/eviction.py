"""Decides what leaves a full tier.

A policy is asked only when something must be evicted, or if it trims while there is room. Lookups
do not come here, and neither does an entry for which there is room.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ..policies import Cut, Item

if TYPE_CHECKING:
    from .ledger import Ledger, News, Slot

P = TypeVar("P")


@dataclass(frozen=True, slots=True, eq=False)
class Eviction(Generic[P]):
    """Makes items leave a ledger, those that its policy chooses. Not thread-safe: the tier holds the
    lock.
    """

    ledger: "Ledger[P]"
    news: "News"  # of the policy
    on_evict: "Callable[[Slot[P]], None]"  # called after a slot has left the ledger

    def resize(self, capacity_bytes: int, now: float) -> None:
        """Change the capacity, and evict what does not fit any more and is not pinned."""
        ledger = self.ledger
        ledger.capacity_bytes = capacity_bytes
        while ledger.used_bytes > max(capacity_bytes, ledger.pinned_bytes):
            self._take(self._victim(now), None, now)

    def make_space(self, item: Item, now: float) -> bool:
        """Evict until `item` fits, and announce it; `Ledger.add` or `cancel` must follow.

        `False` if `item` cannot fit, and then nothing was evicted, or if the policy prefers to lose
        `item` over what is held.
        """
        ledger = self.ledger
        if item.size > ledger.capacity_bytes - ledger.pinned_bytes:
            return False
        ledger.announce(item, now)
        wanted = self.trim(now, item)
        while wanted and not ledger.has_room(item.size):
            wanted = self._take(self._victim(now), item, now)
        if not wanted:
            ledger.cancel(item, now)
        return wanted

    def trim(self, now: float, item: Item | None = None) -> bool:
        """Take the cuts that the policy wants whole; whether `item`, which wants in, is not among
        them.
        """
        overflows = item is not None and not self.ledger.has_room(item.size)
        cuts = list(self.news.tell_all().trims(overflows, now))
        wanted = [self._take(cut._replace(whole=True), item, now) for cut in cuts]
        return all(wanted)

    def _victim(self, now: float) -> Cut:
        pinned = self.ledger.pinned
        cut = self.news.tell_all().victim(pinned, now)
        assert cut is not None and cut.group not in pinned, (
            "a policy must cut while a group is unpinned"
        )
        return cut

    def _take(self, cut: Cut, item: Item | None, now: float) -> bool:
        """Evict a group's last blocks, down to the cut or until `item` has room. `item` wants in.

        `False` if `item` itself is one of the blocks that would go: then it must stay outside.
        Nothing of a pinned group is evicted.
        """
        ledger = self.ledger
        group = ledger.groups.get(cut.group)
        extent = 0 if group is None else group.extent
        is_new = (
            item is not None
            and cut.group == ledger.group_of(item)
            and item.index >= max(cut.keep, extent)
        )
        if cut.group in ledger.pinned or (is_new and not cut.whole):
            # the new block would be the tail of its own group, so it is the first to go
            return not is_new
        while group is not None and group.slots and group.slots[-1].item.index >= cut.keep:
            if not cut.whole and ledger.has_room(0 if item is None else item.size):
                break
            slot = ledger.remove(group.slots[-1].item.key, now)
            assert slot is not None
            self.on_evict(slot)
        return not is_new
