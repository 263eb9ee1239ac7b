"""What leaves a full tier: the ledger's side of an eviction policy.

A policy is asked only when something must go, or if it trims while there is room. A lookup, and an
entry for which there is room, meet none of this.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from ..entry import EntryKey
from ..policies import Cut, Policy

if TYPE_CHECKING:
    from .ledger import Group, Slot

P = TypeVar("P")


class Eviction(ABC, Generic[P]):
    """The part of a `Ledger` that evicts. Not thread-safe: its tier holds the lock."""

    capacity_bytes: int
    used_bytes: int
    on_evict: "Callable[[Slot[P]], None]"
    _groups: "dict[str, Group[P]]"
    _pinned: set[str]
    _pinned_bytes: int

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The policy, which knows all that happened."""

    @abstractmethod
    def remove(self, key: EntryKey, now: float = 0.0) -> "Slot[P] | None":
        """See `Ledger.remove`."""

    @abstractmethod
    def _fits(self, size: int) -> bool:
        """Whether so many bytes are free."""

    def resize(self, capacity_bytes: int, now: float) -> None:
        """Change the capacity, and evict what does not fit any more and is not pinned."""
        self.capacity_bytes = capacity_bytes
        while self.used_bytes > max(capacity_bytes, self._pinned_bytes):
            self._take(self._victim(now), 0, now)

    def evict_for(self, name: str, index: int, size: int, now: float) -> bool:
        """Evict until there is room for a block of `size` bytes, of that number in the group
        `name`, which the policy knows as held. `False` if the policy prefers to lose this block over
        what is held.
        """
        wanted = self.trim(size, now, name, index)
        while wanted and not self._fits(size):
            wanted = self._take(self._victim(now), size, now, name, index)
        return wanted

    def _victim(self, now: float) -> Cut:
        cut = self.policy.victim(self._pinned, now)
        assert cut is not None and cut.group not in self._pinned, (
            "a policy must cut while a group is unpinned"
        )
        return cut

    def trim(self, need: int, now: float, name: str = "", index: int = 0) -> bool:
        """Take the cuts that the policy wants whole; whether the block that wants in is not among
        them.
        """
        cuts = list(self.policy.trims(not self._fits(need), now))
        wanted = [self._take(cut._replace(whole=True), need, now, name, index) for cut in cuts]
        return all(wanted)

    def _take(self, cut: Cut, need: int, now: float, name: str = "", index: int = 0) -> bool:
        """Evict the tail of a group down to the cut, or until `need` bytes are free; whether the
        block that wants in is not part of it.

        Evicts nothing of a pinned group.
        """
        group = self._groups.get(cut.group)
        extent = 0 if group is None else group.extent
        is_new = cut.group == name and index >= max(cut.keep, extent)
        if cut.group in self._pinned or (is_new and not cut.whole):
            # the new block would be the tail of its own group, so it is the first to go
            return not is_new
        while group is not None and group.slots and group.slots[-1].item.index >= cut.keep:
            if not cut.whole and self._fits(need):
                break
            slot = self.remove(group.slots[-1].item.key, now)
            assert slot is not None
            self.on_evict(slot)
        return not is_new
