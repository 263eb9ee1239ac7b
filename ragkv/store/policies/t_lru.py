"""Tail-optimized LRU (T-LRU paper, algorithm 1), and the ways its trimming can be read.

A turn whose uncached blocks stay within xi meets its latency target, so more than `L + Q^ - xi` blocks of a
conversation serve the tail nothing: what lies beyond that budget is free. As printed, the algorithm frees one block
more (`>=`) and may cut below zero; `t-lru-literal` keeps the first, guards the second, and the others do neither.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable

from .base import Cut, PolicySettings, Turn
from .departed import Departed
from .lru import LRU, first_unpinned


class TLRU(LRU):
    """Lazy: free blocks count as infinitely old. They go first, on overflow, only as many as needed, the longest
    unused conversation's first; then LRU. A chunk that stands alone has no turn to expect and is never trimmed."""

    name = "t-lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._budget: dict[str, int] = {}  # blocks worth keeping, set when a turn is served
        self._free: OrderedDict[str, int] = OrderedDict()  # groups beyond their budget -> budget, the last used last
        self._expected = Expected(self.settings.new_blocks)
        self._departed = Departed(self._forget)

    def budget(self, turn: Turn) -> int:
        """Blocks of the conversation that may still help its next turn: max(0, L + Q^ - xi).

        Over a slower tier a dropped block costs the share r of a computed one, so that (xi - Q^) / r may go.
        """
        spare, share = self.settings.xi_blocks - self._expected.blocks, self.settings.load_share
        if share < 1.0 and spare > 0:
            spare = turn.length if share == 0 else min(turn.length, int(spare / share))
        return max(0, turn.length - spare)

    def served(self, turn: Turn) -> None:
        super().served(turn)
        self._expected.learn(turn)
        self._budget[turn.group] = self.budget(turn)
        if turn.group not in self._held:
            self._departed.add(turn.group)
        self._sort_in(turn.group)

    def used(self, group: str, now: float) -> None:
        super().used(group, now)
        if group in self._free:
            self._free.move_to_end(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._held.get(group, 0)
        super().held(group, blocks, size, now)
        if not blocks:
            self._free.pop(group, None)
            self._departed.add(group)
        elif grown:
            self._departed.discard(group)
            self._sort_in(group)
        elif group in self._free and blocks <= self._free[group]:
            del self._free[group]

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        group = first_unpinned(self._free, pinned)
        return super().victim(pinned, now) if group is None else Cut(group, self._free[group])

    def _forget(self, group: str) -> None:
        """Nothing of the group was held for long."""
        self._budget.pop(group, None)

    def _sort_in(self, group: str) -> None:
        """Enter a group just used among those with free blocks, or take it out."""
        budget = self._budget.get(group)
        if budget is not None and self._held.get(group, 0) > budget:
            self._free[group] = budget
            self._free.move_to_end(group)
        else:
            self._free.pop(group, None)


class TLRUAll(TLRU):
    """On overflow everybody is trimmed, needed or not; then LRU."""

    name = "t-lru-all"

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        return [Cut(group, keep, whole=True) for group, keep in self._free.items()] if overflows else ()


class TLRUEager(TLRU):
    """Every conversation is trimmed as soon as its turn is served; then LRU."""

    name = "t-lru-eager"

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        return [Cut(group, keep, whole=True) for group, keep in self._free.items()] if self._free else ()


class TLRULiteral(TLRU):
    """As printed: on overflow each conversation with X >= L + Q^ - xi (and X >= 1) loses one block; then LRU."""

    name = "t-lru-literal"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._printed: dict[str, int] = {}  # L + Q^ - xi, as it is

    def served(self, turn: Turn) -> None:
        super().served(turn)
        self._printed[turn.group] = turn.length + self._expected.blocks - self.settings.xi_blocks

    def _forget(self, group: str) -> None:
        super()._forget(group)
        self._printed.pop(group, None)

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        if not overflows:
            return ()
        least = self._printed.get
        return [Cut(g, x - 1, whole=True) for g, x in self._held.items() if x >= least(g, x + 1)]

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        return LRU.victim(self, pinned, now)


class Expected:
    """Q^: blocks the next turn is expected to add; as given, or the mean over turns from the second on, rounded up."""

    def __init__(self, given: int | None) -> None:
        self.blocks = given or 0
        self._given = given is not None
        self._sum = self._count = 0

    def learn(self, turn: Turn) -> None:
        """Take a turn into the mean."""
        if not self._given and turn.number > 1:
            self._sum += turn.prompt - turn.shared
            self._count += 1
            self.blocks = -(-self._sum // self._count)
