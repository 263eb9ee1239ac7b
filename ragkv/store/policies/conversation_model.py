"""What policies learn of how conversations go on: return gaps, the chance of a return, the rates and Q of the paper.

In the T-LRU paper's birth-death model a living conversation has turns at rate lambda and dies at rate mu. Then an
observed return gap has mean 1 / (lambda + mu) and a turn has a successor with probability lambda / (lambda + mu); both
are read off the turns seen.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from dataclasses import dataclass, replace

from .base import PolicySettings, Turn

RECENT_GAPS = 1024  # return gaps that are remembered


class ReturnGaps:
    """The most recent return gaps, in seconds: their quantiles and survival function."""

    def __init__(self) -> None:
        self.count = 0  # gaps ever added
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, gap: float) -> None:
        """One more conversation returned after `gap` seconds."""
        self.count += 1
        self._recent.append(gap)
        insort(self._sorted, gap)
        if len(self._recent) > RECENT_GAPS:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def quantile(self, share: float) -> float:
        """The gap that `share` of the gaps do not exceed; infinite while none is known."""
        count = len(self._sorted)
        return self._sorted[min(count - 1, int(share * count))] if count else float("inf")

    def survival(self, idle: float) -> float:
        """The share of gaps longer than `idle`; 1 while none is known."""
        count = len(self._sorted)
        return 1 - bisect_right(self._sorted, idle) / count if count else 1.0


class ReturnPredictor:
    """The chance that a conversation returns: P(returns | idle) = p S(idle) / (p S(idle) + 1 - p).

    p is the share of conversations at this turn number that came back, S the share of return gaps longer than the
    silence so far. Silence is evidence, as in the posterior of ET-LRU.
    """

    MOST_TURNS = 8  # from here on, turn counts are one class

    def __init__(self) -> None:
        self.gaps = ReturnGaps()
        self._seen = [0] * (self.MOST_TURNS + 1)  # turns of this number

    def learn(self, turn: Turn) -> None:
        """Count a turn."""
        self._seen[min(turn.number, self.MOST_TURNS)] += 1
        if turn.since is not None:
            self.gaps.add(turn.since)

    def chance(self, number: int, last: float, now: float) -> float:
        """The chance that a conversation whose turn `number` was at `last` comes back after `now`."""
        share = self._share(number) * self.gaps.survival(now - last)
        return share / (share + 1 - self._share(number))

    def _share(self, number: int) -> float:
        """The share of turns of this number that had a next one, kept off 0 and 1 by one turn of each kind."""
        if number < self.MOST_TURNS - 1:
            returned, total = self._seen[number + 1], self._seen[number]
        else:  # late turns are one class: of its turns and those just before it, all in the class are returns
            total = self._seen[self.MOST_TURNS] + self._seen[self.MOST_TURNS - 1]
            returned = self._seen[self.MOST_TURNS]
        return (returned + 1) / (max(total, returned) + 2)


@dataclass(frozen=True)
class ConversationModel:
    """Rates, and P(Q >= q) as steps: `steps[c]` is the largest q of class c, `shares[c]` its P; past the last, 0."""

    turn_rate_per_s: float  # lambda
    end_rate_per_s: float  # mu
    steps: tuple[int, ...]  # the distinct values of Q
    shares: tuple[float, ...]  # one longer

    def worth(self, level: int) -> int:
        """The class of level q: classes with higher numbers have lower P(Q >= q)."""
        return bisect_left(self.steps, level)

    def coarse(self, ratio: float) -> "ConversationModel":
        """The same model with fewer classes: values of Q within `ratio` of the highest P of their class share one."""
        steps: list[int] = []
        shares: list[float] = []
        for step, share in zip(self.steps, self.shares, strict=False):
            if shares and share >= ratio * shares[-1]:
                steps[-1] = step
            else:
                steps.append(step)
                shares.append(share)
        return replace(self, steps=tuple(steps), shares=(*shares, 0.0))


class ModelLearner:
    """A conversation model from settings, and from observed turns where the settings leave it open."""

    EVERY = 512  # turns between two updates of the model

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._turns = self._returns = 0
        self._gaps_s = 0.0
        self._new = Counter(settings.new_blocks_seen)
        self._given = bool(settings.new_blocks_seen)
        rates = settings.turn_rate_per_s, settings.end_rate_per_s
        self._complete = self._given and None not in rates  # nothing is left to learn
        self.model = self._estimate()

    def learn(self, turn: Turn, new_blocks: int) -> bool:
        """Count a turn and its Q; whether `model` changed."""
        if self._complete:
            return False
        self._turns += 1
        if turn.since is not None:
            self._returns += 1
            self._gaps_s += turn.since
            if not self._given:
                self._new[new_blocks] += 1
        if self._turns % self.EVERY and self._turns != 64:
            return False
        self.model = self._estimate()
        return True

    @property
    def returning(self) -> float:
        """The share of turns that had a successor, never 0 or 1."""
        return (self._returns + 1) / (self._turns + 2)

    def _estimate(self) -> ConversationModel:
        rate = self._returns / self._gaps_s if self._gaps_s > 0 else 1.0
        share = self.returning
        given = self._settings
        total, above, shares = sum(self._new.values()) or 1, 0, [0.0]
        for value in sorted(self._new, reverse=True):
            above += self._new[value]
            shares.append(above / total)
        return ConversationModel(
            rate * share if given.turn_rate_per_s is None else given.turn_rate_per_s,
            rate * (1 - share) if given.end_rate_per_s is None else given.end_rate_per_s,
            tuple(sorted(self._new)),
            tuple(reversed(shares)),
        )
