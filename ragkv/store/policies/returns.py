"""Whether a conversation will return, learned online from gaps between turns and from turn counts.

P(returns | idle) = p S(idle) / (p S(idle) + 1 - p): p is the share of conversations at this turn number that came
back, S the share of return gaps longer than the silence so far. Silence is evidence, as in the posterior of ET-LRU.
"""

from bisect import bisect_right, insort
from collections import deque

from .base import Turn

KEPT_GAPS = 1024  # the last so many return gaps


class Gaps:
    """The last return gaps, in seconds: their quantiles and survival function."""

    def __init__(self) -> None:
        self.count = 0  # gaps ever added
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, gap: float) -> None:
        """One more conversation returned after `gap` seconds."""
        self.count += 1
        self._recent.append(gap)
        insort(self._sorted, gap)
        if len(self._recent) > KEPT_GAPS:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def quantile(self, share: float) -> float:
        """The gap that `share` of the gaps do not exceed; infinite while none is known."""
        count = len(self._sorted)
        return self._sorted[min(count - 1, int(share * count))] if count else float("inf")

    def survival(self, idle: float) -> float:
        """The share of gaps longer than `idle`; 1 while none is known."""
        count = len(self._sorted)
        return 1 - bisect_right(self._sorted, idle) / count if count else 1.0


class Returns:
    """The chance that a conversation returns."""

    MOST_TURNS = 8  # from here on, turn counts are one class

    def __init__(self) -> None:
        self.gaps = Gaps()
        self._seen = [0] * (self.MOST_TURNS + 1)  # turns of this number

    def learn(self, turn: Turn) -> None:
        """Take a turn into the counts."""
        self._seen[min(turn.number, self.MOST_TURNS)] += 1
        if turn.since is not None:
            self.gaps.add(turn.since)

    def chance(self, number: int, last: float, now: float) -> float:
        """That a conversation whose turn `number` was at `last` comes back after `now`."""
        share = self._share(number) * self.gaps.survival(now - last)
        return share / (share + 1 - self._share(number))

    def _share(self, number: int) -> float:
        """The share of turns of this number that had a next one, kept off 0 and 1 by one turn of each kind."""
        if number < self.MOST_TURNS - 1:
            came, had = self._seen[number + 1], self._seen[number]
        else:  # late turns are one class: n turns that are not a first one of it, of n + that one
            had = self._seen[self.MOST_TURNS] + self._seen[self.MOST_TURNS - 1]
            came = self._seen[self.MOST_TURNS]
        return (came + 1) / (max(had, came) + 2)
