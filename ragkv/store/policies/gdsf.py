"""Policies for chunk entries, which are read for their content, not their age: how often, how large, how expensive?

Greedy-Dual-Size-Frequency ranks `clock + uses * cost / size`; the clock is the rank of the last victim, so that chunks
unused for long age. Prefill takes time in proportion to tokens, so the true cost is the size, and size cancels (LFU
with dynamic aging); `gdsf` counts every chunk as equally expensive and favours small ones.
"""

from collections.abc import Container
from math import sqrt

from .base import Cut, Policy, PolicySettings
from .departed import Departed
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
        """The benefit of keeping the group, over the space it takes."""
        return self._uses[group] / max(1, self._size[group])

    def used(self, group: str, now: float) -> None:
        if group in self._ranking:
            self._count_use(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._blocks.get(group, 0)
        self._blocks[group], self._size[group] = blocks, size
        if not blocks:
            self._ranking.drop(group)
            del self._blocks[group], self._size[group]
            self._leave(group)
        elif grown:
            self._count_use(group)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        first = self._ranking.first(pinned)
        if first is None:
            return None
        self._clock = max(self._clock, first[0][0])
        return Cut(first[1])

    def _count_use(self, group: str) -> None:
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
    """Ours for chunks: uses are remembered after a chunk has left, and count squared; small chunks count a little more.

    A chunk that comes back is worth what it was; one that was read once does not evict one that is read daily. Rank
    `clock + uses^2 / sqrt(size)`; both exponents were chosen on RAGPulse.
    """

    name = "gdsf-memory"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._departed = Departed(self._forget)

    def worth(self, group: str) -> float:
        return self._uses[group] ** 2 / sqrt(max(1, self._size[group]))

    def _count_use(self, group: str) -> None:
        self._departed.discard(group)
        super()._count_use(group)

    def _leave(self, group: str) -> None:
        if group in self._uses:
            self._departed.add(group)

    def _forget(self, group: str) -> None:
        del self._uses[group]
