"""Expected T-LRU (T-LRU paper, definition 1 and policy 2): evict the block whose loss costs the next turns least.

The X-th block of a conversation of length L is worth `lambda pi(idle) P(Q >= X - L + xi)`: the chance that a turn
comes, times the chance that its Q new blocks make that block matter. `pi` is the belief that the conversation lives.
`et-lru` takes the printed belief exp(-mu idle); as it decays alike for all, ranks never change and one heap will do.
`et-lru-posterior` minds that silence is evidence: e / (e + mu / (mu + lambda) (1 - e)), e = exp(-(lambda + mu) idle);
there ranks do change, and the longest idle conversations of each worth are compared anew at every eviction.

Blocks of equal P(Q >= q) are one class and go together. Lambda and mu are one for all conversations, so lambda cancels.
"""

from abc import abstractmethod
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Container
from math import exp, inf, log
from typing import NamedTuple

from .base import Cut, Policy, PolicySettings, Turn
from .departed import Departed
from .model import Learner
from .ranking import Rank, Ranking


class _Known(NamedTuple):
    """What is known of a group."""

    length: int | None  # L; None for a chunk, all of which always matters
    last: float  # its last use
    number: int  # of that use; breaks ties


class _Expected(Policy):
    """What both beliefs share: lengths, last uses, and the classes of blocks."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._learner = Learner(self.settings)
        self._model = self._learner.model
        self._known: dict[str, _Known] = {}
        self._held: OrderedDict[str, int] = OrderedDict()  # group -> blocks, the last used last
        self._uses = 0
        self._departed = Departed(self._forget)

    def served(self, turn: Turn) -> None:
        if self._learner.learn(turn, self._new_blocks(turn)):
            self._model = self._learner.model
            self._forget_ranks()
            for group in self._held:
                self._enter(group)
        self._note(turn.group, turn.length, turn.at)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._note(group, self._known[group].length, now)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        before = self._held.get(group, 0)
        if not blocks:
            self._leave(group)
            self._held.pop(group, None)
            if group in self._known:
                self._departed.add(group)
            return
        self._held[group] = blocks
        self._departed.discard(group)
        if blocks > before:
            known = self._known.get(group)
            self._note(group, known.length if known else None, now)
        else:
            self._enter(group)

    def _new_blocks(self, turn: Turn) -> int:
        """Q of a turn."""
        return turn.prompt - turn.shared

    def _note(self, group: str, length: int | None, now: float) -> None:
        """A use: the group is the youngest now."""
        self._uses += 1
        self._known[group] = _Known(length, now, self._uses)
        if group in self._held:
            self._held.move_to_end(group)
            self._enter(group)
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
        """The blocks that are left when all of class `worth` and above are gone."""
        length = self._known[group].length
        if length is None or worth == 0:
            return 0
        return max(0, length - self.settings.xi_blocks + self._model.steps[worth - 1])

    @abstractmethod
    def _enter(self, group: str) -> None:
        """Rank a group that is held by what is known of it."""

    @abstractmethod
    def _leave(self, group: str) -> None:
        """The group is not held any more."""

    @abstractmethod
    def _forget_ranks(self) -> None:
        """The model changed."""


class ETLRU(_Expected):
    """Greedy with a heap, by the log of the printed belief: `mu last_use + log P(Q >= X - L + xi)`."""

    name = "et-lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._ranking = Ranking()
        self._set_logs()

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        first, bound = self._ranking.two(pinned)
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

    def _enter(self, group: str) -> None:
        self._ranking.put(group, self._rank(group, self._worth(group)))

    def _leave(self, group: str) -> None:
        self._ranking.drop(group)

    def _forget_ranks(self) -> None:
        self._ranking = Ranking()
        self._set_logs()

    def _set_logs(self) -> None:
        self._costs = [-log(share) if share else inf for share in self._model.shares]  # rising


class ETLRUPosterior(_Expected):
    """By the posterior belief; one queue of conversations for each class of blocks, the longest idle first."""

    name = "et-lru-posterior"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._classes: dict[int, Ranking] = {}  # those that are not empty
        self._order: list[int] = []  # their numbers, rising: the lower, the likelier its blocks matter
        self._class: dict[str, int] = {}  # of a group's last held block

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        best, bound = self._lowest(pinned, now)
        if best is None:
            return None
        _, number, worth, group = best
        shares, chance = self._model.shares, self._belief(self._known[group].last, now)
        _, (last, follower) = self._classes[worth].two(pinned)  # the next of the same class
        if last < inf:
            bound = min(bound, (shares[worth] * self._belief(last, now), follower))
        while worth > 0 and (chance * shares[worth - 1], number) < bound:
            worth -= 1
        return Cut(group, self._floor(group, worth))

    def _lowest(
        self, pinned: Container[str], now: float
    ) -> tuple[tuple[float, int, int, str] | None, tuple[float, int]]:
        """The lowest (score, number of last use, class, group), and below what no other class's score is."""
        shares = self._model.shares
        likeliest_gone = self._belief(self._known[next(iter(self._held))].last, now) if self._held else 1.0
        best: tuple[float, int, int, str] | None = None
        bound = (inf, 0)
        for worth in reversed(self._order):
            if shares[worth] * likeliest_gone > bound[0]:
                break  # not even the longest idle of all comes below these two
            first = self._classes[worth].first(pinned)
            if first is not None:
                (last, number), group = first
                head = (shares[worth] * self._belief(last, now), number, worth, group)
                if best is None:
                    best = head
                    continue
                best, other = min(best, head), max(best, head)
                bound = min(bound, other[:2])
        return best, bound

    def _belief(self, last: float, now: float) -> float:
        """That a conversation idle since `last` lives."""
        turns, ends = self._model.turn_rate_per_s, self._model.end_rate_per_s
        silent = exp(-(turns + ends) * max(0.0, now - last))
        dead = ends / (turns + ends) * (1 - silent) if turns + ends else 0.0
        return silent / (silent + dead) if silent + dead else 0.0

    def _enter(self, group: str) -> None:
        self._leave(group)
        worth, known = self._worth(group), self._known[group]
        self._class[group] = worth
        if worth not in self._classes:
            self._classes[worth] = Ranking()
            insort(self._order, worth)
        self._classes[worth].put(group, (known.last, known.number))

    def _leave(self, group: str) -> None:
        worth = self._class.pop(group, None)
        if worth is not None:
            self._classes[worth].drop(group)
            if not self._classes[worth]:
                del self._classes[worth]
                self._order.remove(worth)

    def _forget_ranks(self) -> None:
        self._classes, self._class, self._order = {}, {}, []
