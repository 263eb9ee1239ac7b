"""First in, first out: a baseline of CachedAttention (section 4.3.3)."""

from .base import Turn
from .lru import LRU


class FIFO(LRU):
    """Evicts what came in first; no use changes that, nor does growing."""

    name = "fifo"

    def served(self, turn: Turn) -> None:
        pass

    def used(self, group: str, now: float) -> None:
        pass

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        if blocks:
            self._held[group] = blocks
        else:
            self._held.pop(group, None)
