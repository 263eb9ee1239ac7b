"""Least recently used: the CacheBlend paper's policy (section 5.1) and the baseline of every other."""

from collections import OrderedDict
from collections.abc import Container

from .base import Cut, Policy, PolicySettings, Turn


class LRU(Policy):
    """Evicts what was not used for longest; insertion counts as a use."""

    name = "lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._held: OrderedDict[str, int] = OrderedDict()  # group -> blocks, the last used last

    def served(self, turn: Turn) -> None:
        if turn.group in self._held:
            self._held.move_to_end(turn.group)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._held.move_to_end(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        before = self._held.get(group, 0)
        if blocks:
            self._held[group] = blocks
            if 0 < before < blocks:
                self._held.move_to_end(group)
        elif before:
            del self._held[group]

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        oldest = first_unpinned(self._held, pinned)
        return None if oldest is None else Cut(oldest)


def first_unpinned(groups: OrderedDict[str, int], pinned: Container[str]) -> str | None:
    """The first of `groups` that is not pinned, or `None`."""
    for group in groups:
        if group not in pinned:
            return group
    return None
