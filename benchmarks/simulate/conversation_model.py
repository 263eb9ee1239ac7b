"""The birth-death model of conversations (T-LRU paper): its rates and Q, given or learned.

A living conversation has turns at rate lambda and dies at rate mu. Then an observed return gap has
mean 1 / (lambda + mu). A turn has a successor with probability lambda / (lambda + mu). Both are
estimated from the turns seen.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from ragkv.store.policies import PolicySettings, TurnSize


@dataclass(frozen=True, slots=True)
class TraceSettings(PolicySettings):
    """What a trace tells of its conversations; what is None or empty is learned from the turns."""

    new_blocks_seen: tuple[int, ...] = ()  # a sample of Q, for its distribution
    turn_rate_per_s: float | None = None  # lambda: turns of a living conversation
    end_rate_per_s: float | None = None  # mu: deaths of a living conversation


@dataclass(frozen=True)
class ConversationModel:
    """Rates, and P(Q >= q) as steps: `steps[c]` is the largest q of class c, `shares[c]` its P;
    past the last, 0.
    """

    turn_rate_per_s: float  # lambda
    end_rate_per_s: float  # mu
    steps: tuple[int, ...]  # the distinct values of Q
    shares: tuple[float, ...]  # one longer

    def worth(self, level: int) -> int:
        """The class of level q: classes with higher numbers have lower P(Q >= q)."""
        return bisect_left(self.steps, level)


class ModelLearner:
    """A conversation model from settings, and from observed turns where the settings leave
    it open.
    """

    EVERY = 512  # turns between two updates of the model

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._turns = self._returns = 0
        self._gaps_s = 0.0
        self._new = Counter(settings.new_blocks_seen)
        self._given = bool(settings.new_blocks_seen)
        rates = settings.turn_rate_per_s, settings.end_rate_per_s
        self._complete = self._given and None not in rates  # nothing is left to learn
        self.model = self._estimate()

    def learn(self, turn: TurnSize, new_blocks: int) -> bool:
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

    def _estimate(self) -> ConversationModel:
        rate = self._returns / self._gaps_s if self._gaps_s > 0 else 1.0
        share = (self._returns + 1) / (self._turns + 2)  # of turns with a successor, never 0 or 1
        given = self._settings
        total = sum(self._new.values()) or 1
        above = 0
        shares = [0.0]
        for value in sorted(self._new, reverse=True):
            above += self._new[value]
            shares.append(above / total)
        return ConversationModel(
            rate * share if given.turn_rate_per_s is None else given.turn_rate_per_s,
            rate * (1 - share) if given.end_rate_per_s is None else given.end_rate_per_s,
            tuple(sorted(self._new)),
            tuple(reversed(shares)),
        )
