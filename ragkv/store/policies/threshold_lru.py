"""LRU that does not keep short conversations. It is a baseline of the T-LRU paper, and OpenAI's
published rule.
"""

from collections.abc import Iterable

from .base import Cut
from .inputs import PolicySettings, TurnSize
from .lru import LRU


class ThresholdLRU(LRU):
    """Does not keep conversations of L B < `threshold_tokens` tokens. A chunk that stands alone has
    no length and is kept.
    """

    name = "threshold-lru"
    trims_early = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._short: str | None = None  # the conversation served last, if it is too short to keep

    def served(self, turn: TurnSize) -> None:
        super().served(turn)
        short = turn.length * self.settings.block_tokens < self.settings.threshold_tokens
        self._short = turn.group if short else None

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        return (
            ()
            if self._short is None or self._short not in self._held
            else (Cut(self._short, whole=True),)
        )
