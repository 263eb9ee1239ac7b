"""Expected T-LRU (T-LRU paper, definition 1 and policy 2): evicts the block whose loss costs the
next turns least.

The X-th block of a conversation of length L is worth `lambda pi(idle) P(Q >= X - L + xi)`. This is
the chance that a turn comes, times the chance that its Q new blocks make that block matter. `pi` is
the belief that the conversation lives: exp(-mu idle), as printed in the paper. It decays alike for
all conversations, so ranks never change and one heap is enough.

Blocks of equal P(Q >= q) are one class and are evicted together. All conversations share lambda and
mu, so lambda cancels.
"""

from collections import OrderedDict
from collections.abc import Container
from math import inf, log
from typing import NamedTuple

from ragkv.store.policies import Eviction, Policy, PolicySettings, TurnSize
from ragkv.store.policies.lru import Rank, Ranking
from ragkv.store.policies.t_lru import Departed

from .conversation_model import ModelLearner, TraceSettings


class _GroupState(NamedTuple):
    """What is known of a group."""

    length: int | None  # L; None for a chunk that stands alone, all of which always matters
    last: float  # the time of its last use
    number: int  # of that use; breaks ties


class ETLRU(Policy):
    """Greedy with a heap, by the log of the printed belief: `mu last_use + log P(Q >= X -
    L + xi)`.
    """

    needs_target = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        known = settings if isinstance(settings, TraceSettings) else TraceSettings()
        self._learner = ModelLearner(known)
        self._model = self._learner.model
        self._known: dict[str, _GroupState] = {}
        # group -> blocks, the most recently used last
        self._held: OrderedDict[str, int] = OrderedDict()
        self._uses = 0
        self._departed = Departed(self._forget)
        self._forget_ranks()

    def turn_prefilled(self, turn: TurnSize) -> None:
        if self._learner.learn(turn, turn.prompt - turn.shared):
            self._model = self._learner.model
            self._rank_all()
        self._record_use(turn.group, turn.length, turn.at)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._record_use(group, self._known[group].length, now)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        before = self._held.get(group, 0)
        if not blocks:
            self._ranking.drop(group)
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

    def _floor(self, group: str) -> int:
        """The blocks that are left once all of the last one's class are evicted."""
        length = self._known[group].length
        worth = self._worth(group)
        if length is None or worth == 0:
            return 0
        return max(0, length - self.settings.xi_blocks + self._model.steps[worth - 1])

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        first = self._ranking.first(leased)
        if first is None:
            return None
        return Eviction(first[1], self._floor(first[1]))

    def _rank(self, group: str, worth: int) -> Rank:
        known = self._known[group]
        return self._model.end_rate_per_s * known.last - self._costs[worth], known.number

    def _rank_group(self, group: str) -> None:
        self._ranking.put(group, self._rank(group, self._worth(group)))

    def retarget(self, xi_blocks: int) -> None:
        super().retarget(xi_blocks)
        self._rank_all()

    def _rank_all(self) -> None:
        self._forget_ranks()
        for group in self._held:
            self._rank_group(group)

    def _forget_ranks(self) -> None:
        """Drop all ranks: the model changed."""
        self._ranking = Ranking()
        self._costs = [-log(share) if share else inf for share in self._model.shares]  # by class
