"""What is known of how conversations go on: the rates of the T-LRU paper's birth-death model, and the Q of a turn.

A living conversation has turns at rate lambda and dies at rate mu. Then an observed return gap has mean
1 / (lambda + mu) and a turn has a successor with probability lambda / (lambda + mu); both are read off the turns seen.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace

from .base import PolicySettings, Turn


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
        """The same with fewer classes: those within `ratio` of the highest P of their class are one."""
        steps: list[int] = []
        shares: list[float] = []
        for step, share in zip(self.steps, self.shares, strict=False):
            if shares and share >= ratio * shares[-1]:
                steps[-1] = step
            else:
                steps.append(step)
                shares.append(share)
        return replace(self, steps=tuple(steps), shares=(*shares, 0.0))


class Learner:
    """A conversation model from settings, and from turns where these are silent."""

    EVERY = 512  # turns between two looks

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._turns = self._returns = 0
        self._gaps_s = 0.0
        self._new = Counter(settings.new_blocks_seen)
        self._given = bool(settings.new_blocks_seen)
        rates = settings.turn_rate_per_s, settings.end_rate_per_s
        self.complete = self._given and None not in rates  # nothing is left to learn
        self.model = self._look()

    def learn(self, turn: Turn, new_blocks: int) -> bool:
        """Take a turn, and its Q, into the counts; whether `model` changed."""
        if self.complete:
            return False
        self._turns += 1
        if turn.since is not None:
            self._returns += 1
            self._gaps_s += turn.since
            if not self._given:
                self._new[new_blocks] += 1
        if self._turns % self.EVERY and self._turns != 64:
            return False
        self.model = self._look()
        return True

    @property
    def returning(self) -> float:
        """The share of turns that had a successor, never 0 or 1."""
        return (self._returns + 1) / (self._turns + 2)

    def _look(self) -> ConversationModel:
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
