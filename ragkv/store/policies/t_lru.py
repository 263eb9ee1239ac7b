"""Tail-optimized LRU (T-LRU paper, algorithm 1), and a variant with a guard that evicts dead
conversations first.

A turn meets its latency target if at most xi of its blocks are uncached. So keeping more than `L +
Q^ - xi` blocks of a conversation does not shorten the tail, and blocks beyond that budget are free.
As printed, the algorithm frees one block more (`>=`) and may go below zero. We do neither.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Container

from .base import Eviction
from .inputs import PolicySettings, TurnSize
from .lru import LRU, first_unleased

MOST_DEPARTED = 100_000  # So many groups that have left are remembered.
RECENT_GAPS = 1024  # So many return gaps are remembered.


class Departed:
    """The last `MOST_DEPARTED` groups of which nothing is held; calls `forget` for those that left
    earlier.

    What a policy knows of a group outlives its blocks. A turn is reported before its blocks come,
    and a refused block leaves its group empty. The next block must still be judged by that turn.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._groups: OrderedDict[str, None] = OrderedDict()

    def add(self, group: str) -> None:
        """Nothing of `group` is held now."""
        self._groups[group] = None
        self._groups.move_to_end(group)
        if len(self._groups) > MOST_DEPARTED:
            self._forget(self._groups.popitem(last=False)[0])

    def discard(self, group: str) -> None:
        """Something of `group` is held again."""
        self._groups.pop(group, None)


class TLRU(LRU):
    """Lazy trimming: free blocks count as infinitely old. They are evicted first, only on overflow
    and only as many as needed, those of the longest unused conversation first; then LRU. A chunk
    that stands alone expects no turn and is never trimmed.
    """

    needs_target = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._budget: dict[str, int] = {}  # blocks worth keeping, set when a turn is served
        # groups beyond their budget -> budget, last used last
        self._free: OrderedDict[str, int] = OrderedDict()
        self._expected = ExpectedNewBlocks(self.settings.new_blocks)
        self._departed = Departed(self._forget)

    def budget(self, turn: TurnSize) -> int:
        """Blocks of the conversation that may still help its next turn: max(0, L + Q^ - xi)."""
        return max(0, turn.length + self._expected.blocks - self.settings.xi_blocks)

    def turn_prefilled(self, turn: TurnSize) -> None:
        super().turn_prefilled(turn)
        self._expected.learn(turn)
        self._budget[turn.group] = self.budget(turn)
        if turn.group not in self._held:
            self._departed.add(turn.group)
        self._update_free(turn.group)

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
            self._update_free(group)
        elif group in self._free and blocks <= self._free[group]:
            del self._free[group]

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        group = first_unleased(self._free, leased)
        return super().victim(leased, now) if group is None else Eviction(group, self._free[group])

    def _forget(self, group: str) -> None:
        self._budget.pop(group, None)

    def _update_free(self, group: str) -> None:
        """Add a group that was just used to those with free blocks, or remove it."""
        budget = self._budget.get(group)
        if budget is not None and self._held.get(group, 0) > budget:
            self._free[group] = budget
            self._free.move_to_end(group)
        else:
            self._free.pop(group, None)


class ExpectedNewBlocks:
    """Q^: blocks the next turn is expected to add; as given, or the mean over turns from the second
    on, rounded up.
    """

    def __init__(self, given: int | None) -> None:
        self.blocks = given or 0
        self._given = given is not None
        self._sum = self._count = 0

    def learn(self, turn: TurnSize) -> None:
        """Add a turn to the mean."""
        if not self._given and turn.number > 1:
            self._sum += turn.prompt - turn.shared
            self._count += 1
            self.blocks = -(-self._sum // self._count)


class ReturnGaps:
    """The most recent return gaps, in seconds, and their quantiles."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, gap: float) -> None:
        """One more conversation returned after `gap` seconds."""
        self._recent.append(gap)
        insort(self._sorted, gap)
        if len(self._recent) > RECENT_GAPS:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def quantile(self, share: float) -> float:
        """The gap that `share` of the gaps do not exceed; infinite while none is known."""
        count = len(self._sorted)
        return self._sorted[min(count - 1, int(share * count))] if count else float("inf")


class GuardedTLRU(TLRU):
    """Ours: T-LRU that first evicts the longest unused conversation if it is idle beyond a quantile
    of return gaps.

    Plain T-LRU trims conversations in use before it takes a block of a dead one, and is then worse
    than LRU on its own target. A conversation idle for longer than nearly every observed return gap
    is almost surely dead.
    """

    QUANTILE = 0.95  # of the return gaps

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._last_turn_at: dict[str, float] = {}  # by conversation
        self._gaps = ReturnGaps()
        self._limit_s = float("inf")

    def turn_prefilled(self, turn: TurnSize) -> None:
        super().turn_prefilled(turn)
        self._last_turn_at[turn.group] = turn.at
        if turn.since is not None:
            self._gaps.add(turn.since)
            self._limit_s = self._gaps.quantile(self.QUANTILE)

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        oldest = first_unleased(self._held, leased)
        if oldest in self._last_turn_at and now - self._last_turn_at[oldest] > self._limit_s:
            return Eviction(oldest)
        return super().victim(leased, now)

    def _forget(self, group: str) -> None:
        super()._forget(group)
        self._last_turn_at.pop(group, None)
