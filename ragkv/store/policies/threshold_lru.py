"""Threshold-LRU: short conversations are not kept (a baseline of the T-LRU paper, and OpenAI's published rule)."""

from collections.abc import Iterable

from .base import Cut, PolicySettings, Turn
from .lru import LRU


class ThresholdLRU(LRU):
    """LRU, but a conversation of L B < `threshold_tokens` tokens is not kept. A chunk alone has no length and is."""

    name = "threshold-lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._short: str | None = None  # the conversation served last, if it is to be dropped

    def served(self, turn: Turn) -> None:
        super().served(turn)
        short = turn.length * self.settings.block_tokens < self.settings.threshold_tokens
        self._short = turn.group if short else None

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        return () if self._short is None or self._short not in self._held else (Cut(self._short, whole=True),)
