"""Statistics of conversations that policies need: which have left, return gaps, and the rates and Q
of the T-LRU paper.

In the T-LRU paper's birth-death model a living conversation has turns at rate lambda and dies at
rate mu. Then an observed return gap has mean 1 / (lambda + mu). A turn has a successor with
probability lambda / (lambda + mu). Both are estimated from the turns seen.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from .inputs import PolicySettings, TurnSize

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

    def __init__(self, settings: PolicySettings) -> None:
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
