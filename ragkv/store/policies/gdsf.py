"""Policies for chunk entries, which are read for their content, not their age: how often, how large, how dear?

Greedy-Dual-Size-Frequency ranks `clock + uses * cost / size`; the clock is the rank of the last one that went, so what
is not used for long ages. Prefill takes time in proportion to tokens, so cost = size is the honest cost and size
cancels (LFU with dynamic aging); `gdsf` counts every chunk as equally dear and favours small ones.
"""

from collections import OrderedDict
from collections.abc import Container
from math import sqrt

from .base import Cut, Policy, PolicySettings
from .ranking import Ranking


class GDSF(Policy):
    """Every chunk costs the same: more hits, of smaller chunks."""

    name = "gdsf"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._ranking = Ranking()
        self._uses: dict[str, int] = {}
        self._size: dict[str, int] = {}
        self._blocks: dict[str, int] = {}
        self._clock = 0.0
        self._events = 0

    def worth(self, group: str) -> float:
        """What keeping the group is worth for its room."""
        return self._uses[group] / max(1, self._size[group])

    def used(self, group: str, now: float) -> None:
        if group in self._ranking:
            self._count(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._blocks.get(group, 0)
        self._blocks[group], self._size[group] = blocks, size
        if not blocks:
            self._ranking.drop(group)
            del self._blocks[group], self._size[group]
            self._leave(group)
        elif grown:
            self._count(group)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        first = self._ranking.first(pinned)
        if first is None:
            return None
        self._clock = max(self._clock, first[0][0])
        return Cut(first[1])

    def _count(self, group: str) -> None:
        self._events += 1
        self._uses[group] = self._uses.get(group, 0) + 1
        self._ranking.put(group, (self._clock + self.worth(group), self._events))

    def _leave(self, group: str) -> None:
        self._uses.pop(group, None)


class LFUDA(GDSF):
    """A chunk costs its tokens, so that size cancels: more tokens found."""

    name = "lfu-da"

    def worth(self, group: str) -> float:
        return self._uses[group]


class GDSFMemory(GDSF):
    """Ours for chunks: uses are remembered after a chunk has left, and weigh squared; small chunks weigh a little more.

    A chunk that comes back is worth what it was; one that was read once does not push out what is read daily. Rank
    `clock + uses^2 / sqrt(size)`; both exponents were chosen on RAGPulse.
    """

    name = "gdsf-memory"
    REMEMBERED = 100_000  # chunks that left, the last of them

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._gone: OrderedDict[str, None] = OrderedDict()

    def worth(self, group: str) -> float:
        return self._uses[group] ** 2 / sqrt(max(1, self._size[group]))

    def _count(self, group: str) -> None:
        self._gone.pop(group, None)
        super()._count(group)

    def _leave(self, group: str) -> None:
        if group not in self._uses:
            return
        self._gone[group] = None
        if len(self._gone) > self.REMEMBERED:
            del self._uses[self._gone.popitem(last=False)[0]]
