"""ET-LRU that learns (ours): the chance of a return from observed gaps instead of rates, and Q from the turns seen.

Real gaps are not exponential, and no rate is known in advance. A conversation idle for s seconds has its next turn
within the horizon h with chance `p (S(s) - S(s + h)) / (p S(s) + 1 - p)`: p is the share of turns that had a successor,
S the share of recent return gaps longer than s. A block is worth that chance times P(Q >= X - L + xi), as in ET-LRU;
blocks whose P differ by less than a factor of two are one class, which makes it fast. Nothing is known beforehand.

Conversations contract, and then blocks that the next prompt does not share were useless. So a turn's Q is taken from
the blocks that proved useful, min(sh, in - xi) of the L blocks before it: Q = xi - (L - useful), which is in - sh where
nothing was lost. So even without a threshold it is not LRU, but better.

With exponential gaps every horizon ranks as the posterior does. With heavy tails a conversation that may return some
day is worth less than one that returns soon; h is twice the 95th percentile of the gaps.
"""

from dataclasses import replace

from .base import PolicySettings, Turn
from .conversation_model import ReturnGaps
from .et_lru import ETLRUPosterior


class LearnedETLRU(ETLRUPosterior):
    """ET-LRU by a learned chance of return; the longest idle of each class of blocks are compared at every eviction."""

    name = "et-lru-learned"
    RATIO = 0.5  # of P within a class
    HORIZON = 2.0, 0.95  # times this quantile of gaps
    EVERY = 64  # gaps between two updates of the horizon

    def __init__(self, settings: PolicySettings | None = None) -> None:
        given = settings or PolicySettings()
        super().__init__(replace(given, new_blocks_seen=(), turn_rate_per_s=None, end_rate_per_s=None))
        self._gaps = ReturnGaps()
        self._horizon_s = float("inf")

    def served(self, turn: Turn) -> None:
        if turn.since is not None:
            self._gaps.add(turn.since)
            if self._gaps.count % self.EVERY == 0:
                times, share = self.HORIZON
                self._horizon_s = times * self._gaps.quantile(share)
        super().served(turn)

    def _new_blocks(self, turn: Turn) -> int:
        known = self._known.get(turn.group)
        if known is None or known.length is None:
            return super()._new_blocks(turn)
        useful = min(turn.shared, turn.prompt - self.settings.xi_blocks)  # below 0 for a short prompt, as Q may be
        return self.settings.xi_blocks - (known.length - useful)

    def _forget_ranks(self) -> None:
        super()._forget_ranks()
        self._model = self._learner.model.coarse(self.RATIO)

    def _belief(self, last: float, now: float) -> float:
        idle, share = now - last, self._learner.returning
        longer = self._gaps.survival(idle)
        return share * (longer - self._gaps.survival(idle + self._horizon_s)) / (share * longer + 1 - share)
