"""Guarded T-LRU (ours): conversations that are probably over go before anybody is trimmed.

Plain T-LRU trims conversations in use before it takes a block of a dead one, and is then worse than LRU on its own
target. A conversation idle for longer than nearly every observed return gap is nearly surely dead.
"""

from collections.abc import Container

from .base import Cut, PolicySettings, Turn
from .lru import first_unpinned
from .returns import Gaps
from .t_lru import TLRU


class GuardedTLRU(TLRU):
    """First the longest idle conversation, if it is idle beyond the `guard_quantile` of return gaps; then T-LRU."""

    name = "t-lru-guarded"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._gaps = Gaps()
        self._last: dict[str, float] = {}  # when a conversation had its last turn
        self._limit = float("inf")  # seconds

    def served(self, turn: Turn) -> None:
        super().served(turn)
        self._last[turn.group] = turn.at
        if turn.since is not None:
            self._gaps.add(turn.since)
            self._limit = self._gaps.quantile(self.settings.guard_quantile)

    def _forget(self, group: str) -> None:
        super()._forget(group)
        self._last.pop(group, None)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        oldest = first_unpinned(self._held, pinned)
        if oldest is not None and now - self._last.get(oldest, now) > self._limit:
            return Cut(oldest)
        return super().victim(pinned, now)
