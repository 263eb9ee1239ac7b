"""Least recently used: the CacheBlend paper's policy (section 5.1), the baseline of all others, and
its simple kin.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable

from .base import Cut, Policy, PolicySettings, TurnSize


class LRU(Policy):
    """Evicts the group unused for longest; insertion counts as a use."""

    name = "lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        # group -> blocks, the most recently used last
        self._held: OrderedDict[str, int] = OrderedDict()

    def served(self, turn: TurnSize) -> None:
        self.used(turn.group, turn.at)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._held.move_to_end(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._held.get(group, 0)
        if blocks:
            self._held[group] = blocks
        else:
            self._held.pop(group, None)
        if grown:
            self._held.move_to_end(group)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        oldest = first_unpinned(self._held, pinned)
        return None if oldest is None else Cut(oldest)


class ThresholdLRU(LRU):
    """LRU that does not keep conversations of L B < `threshold_tokens` tokens: a baseline of the
    T-LRU paper, and OpenAI's published rule. A chunk that stands alone has no length and is kept.
    """

    name = "threshold-lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._short: str | None = None  # the conversation served last, if it is too short to keep

    def served(self, turn: TurnSize) -> None:
        super().served(turn)
        short = turn.length * self.settings.block_tokens < self.settings.threshold_tokens
        self._short = turn.group if short else None

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        return (
            ()
            if self._short is None or self._short not in self._held
            else (Cut(self._short, whole=True),)
        )


def first_unpinned(groups: OrderedDict[str, int], pinned: Container[str]) -> str | None:
    """The first of `groups` that is not pinned, or `None`."""
    return next((group for group in groups if group not in pinned), None)
