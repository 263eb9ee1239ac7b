"""Expected T-LRU (T-LRU paper, definition 1 and policy 2): evict the block whose loss costs the next turns least.

The X-th block of a conversation of length L is worth `lambda pi(idle) P(Q >= X - L + xi)`: the chance that a turn
comes, times the chance that its Q new blocks make that block matter. `pi` is the belief that the conversation lives.
`et-lru` takes the printed belief exp(-mu idle); as it decays alike for all, ranks never change and one heap is enough.
`et-lru-posterior` accounts for silence as evidence: e / (e + mu / (mu + lambda) (1 - e)), e = exp(-(lambda + mu) idle);
its ranks do change, and the longest idle conversations of each worth are compared anew at every eviction.

Blocks of equal P(Q >= q) are one class and are evicted together. All conversations share lambda and mu, so lambda
cancels.
"""

from abc import abstractmethod
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Container
from math import exp, inf, log
from typing import NamedTuple

from .base import Cut, Policy, PolicySettings, Turn
from .conversation_model import ModelLearner
from .departed import Departed
from .ranking import Rank, Ranking


class _GroupState(NamedTuple):
    """What is known of a group."""

    length: int | None  # L; None for a chunk that stands alone, all of which always matters
    last: float  # the time of its last use
    number: int  # of that use; breaks ties


class _Candidate(NamedTuple):
    """A group that may be evicted; the lowest is."""

    score: float
    number: int  # of its last use
    worth: int  # the class of its last held block
    group: str


class _ExpectedTLRU(Policy):
    """What the policies of all beliefs share: lengths, last uses, and the classes of blocks."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._learner = ModelLearner(self.settings)
        self._model = self._learner.model
        self._known: dict[str, _GroupState] = {}
        self._held: OrderedDict[str, int] = OrderedDict()  # group -> blocks, the most recently used last
        self._uses = 0
        self._departed = Departed(self._forget)

    def served(self, turn: Turn) -> None:
        if self._learner.learn(turn, self._new_blocks(turn)):
            self._model = self._learner.model
            self._forget_ranks()
            for group in self._held:
                self._rank_group(group)
        self._record_use(turn.group, turn.length, turn.at)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._record_use(group, self._known[group].length, now)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        before = self._held.get(group, 0)
        if not blocks:
            self._unrank(group)
            self._held.pop(group, None)
            if group in self._known:
                self._departed.add(group)
            return
        self._held[group] = blocks
        self._departed.discard(group)
        if blocks > before:
            known = self._known.get(group)
            self._record_use(group, known.length if known else None, now)
        else:
            self._rank_group(group)

    def _new_blocks(self, turn: Turn) -> int:
        """Q of a turn."""
        return turn.prompt - turn.shared

    def _record_use(self, group: str, length: int | None, now: float) -> None:
        self._uses += 1
        self._known[group] = _GroupState(length, now, self._uses)
        if group in self._held:
            self._held.move_to_end(group)
            self._rank_group(group)
        else:
            self._departed.add(group)

    def _forget(self, group: str) -> None:
        del self._known[group]

    def _worth(self, group: str) -> int:
        """The class of the group's last held block."""
        length = self._known[group].length
        if length is None:
            return 0
        return self._model.worth(self._held[group] - length + self.settings.xi_blocks)

    def _floor(self, group: str, worth: int) -> int:
        """The blocks that are left once all of class `worth` and above are evicted."""
        length = self._known[group].length
        if length is None or worth == 0:
            return 0
        return max(0, length - self.settings.xi_blocks + self._model.steps[worth - 1])

    @abstractmethod
    def _rank_group(self, group: str) -> None:
        """Rank a held group by what is known of it."""

    @abstractmethod
    def _unrank(self, group: str) -> None:
        """Remove a group that is no longer held."""

    @abstractmethod
    def _forget_ranks(self) -> None:
        """Drop all ranks: the model changed."""


class ETLRU(_ExpectedTLRU):
    """Greedy with a heap, by the log of the printed belief: `mu last_use + log P(Q >= X - L + xi)`."""

    name = "et-lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._forget_ranks()

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        first, bound = self._ranking.first_two(pinned)
        if first is None:
            return None
        _, group = first
        worth, base = self._worth(group), self._rank(group, 0)[0]
        lowest = max(0, bisect_right(self._costs, base - bound[0]) - 1)
        while lowest < worth and self._rank(group, lowest) >= bound:  # one step or two: the bisection rounds
            lowest += 1
        return Cut(group, self._floor(group, min(worth, lowest)))

    def _rank(self, group: str, worth: int) -> Rank:
        known = self._known[group]
        return self._model.end_rate_per_s * known.last - self._costs[worth], known.number

    def _rank_group(self, group: str) -> None:
        self._ranking.put(group, self._rank(group, self._worth(group)))

    def _unrank(self, group: str) -> None:
        self._ranking.drop(group)

    def _forget_ranks(self) -> None:
        self._ranking = Ranking()
        self._costs = [-log(share) if share else inf for share in self._model.shares]  # by class, rising


class ETLRUPosterior(_ExpectedTLRU):
    """By the posterior belief; one queue of conversations for each class of blocks, the longest idle first."""

    name = "et-lru-posterior"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._forget_ranks()

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        best, bound = self._lowest(pinned, now)
        if best is None:
            return None
        _, number, worth, group = best
        shares, chance = self._model.shares, self._belief(self._known[group].last, now)
        _, (last, follower) = self._classes[worth].first_two(pinned)  # the next of the same class
        if last < inf:
            bound = min(bound, (shares[worth] * self._belief(last, now), follower))
        while worth > 0 and (chance * shares[worth - 1], number) < bound:
            worth -= 1
        return Cut(group, self._floor(group, worth))

    def _lowest(self, pinned: Container[str], now: float) -> tuple[_Candidate | None, Rank]:
        """The lowest candidate, and a rank that no candidate of another class is below."""
        shares = self._model.shares
        least_belief = self._belief(self._known[next(iter(self._held))].last, now) if self._held else 1.0
        best: _Candidate | None = None
        bound: Rank = (inf, 0)
        for worth in reversed(self._order):
            if shares[worth] * least_belief > bound[0]:
                break  # not even the longest idle group of all comes below these two
            first = self._classes[worth].first(pinned)
            if first is not None:
                (last, number), group = first
                candidate = _Candidate(shares[worth] * self._belief(last, now), number, worth, group)
                if best is None:
                    best = candidate
                    continue
                best, other = min(best, candidate), max(best, candidate)
                bound = min(bound, other[:2])
        return best, bound

    def _belief(self, last: float, now: float) -> float:
        """The chance that a conversation idle since `last` lives."""
        turns, ends = self._model.turn_rate_per_s, self._model.end_rate_per_s
        silent = exp(-(turns + ends) * max(0.0, now - last))
        dead = ends / (turns + ends) * (1 - silent) if turns + ends else 0.0
        return silent / (silent + dead) if silent + dead else 0.0

    def _rank_group(self, group: str) -> None:
        self._unrank(group)
        worth, known = self._worth(group), self._known[group]
        self._class[group] = worth
        if worth not in self._classes:
            self._classes[worth] = Ranking()
            insort(self._order, worth)
        self._classes[worth].put(group, (known.last, known.number))

    def _unrank(self, group: str) -> None:
        worth = self._class.pop(group, None)
        if worth is not None:
            self._classes[worth].drop(group)
            if not self._classes[worth]:
                del self._classes[worth]
                self._order.remove(worth)

    def _forget_ranks(self) -> None:
        self._classes: dict[int, Ranking] = {}  # those that are not empty
        self._order: list[int] = []  # their numbers, rising: the lower, the likelier its blocks matter
        self._class: dict[str, int] = {}  # of a group's last held block
