"""T-LRU with knowledge of the future (T-LRU paper, figure 5): how much is which prediction worth?

End-aware also runs live: where nobody knows the future it asks a predictor that learned from gaps and turn counts.
"""

from collections.abc import Container

from .base import NEVER, Cut, PolicySettings, Turn
from .returns import Returns
from .t_lru import TLRU


class EndAware(TLRU):
    """Nothing of a conversation that does not return is worth keeping: its budget is 0.

    Without an oracle, conversations whose chance to return fell below `DOUBT` go before anything is trimmed.
    """

    name = "end-aware"
    DOUBT = 0.05

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._returns = Returns()
        self._unsure: dict[str, tuple[int, float]] = {}  # group -> number of its last turn, and when it was

    def budget(self, turn: Turn) -> int:
        return 0 if turn.next is NEVER else super().budget(turn)

    def served(self, turn: Turn) -> None:
        super().served(turn)
        if turn.next is None:
            self._returns.learn(turn)
            self._unsure[turn.group] = turn.number, turn.at

    def _forget(self, group: str) -> None:
        super()._forget(group)
        self._unsure.pop(group, None)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        for group in self._held if self._unsure else ():  # the longest unused is the least likely to return
            if group not in pinned:
                if group in self._unsure and self._returns.chance(*self._unsure[group], now) < self.DOUBT:
                    return Cut(group)
                break
        return super().victim(pinned, now)


class LengthAware(TLRU):
    """Knows the next turn's lengths too: budget min(sh_next, in_next - xi), 0 if it never comes."""

    name = "length-aware"
    offline = True

    def budget(self, turn: Turn) -> int:
        if turn.next is None:
            return super().budget(turn)
        return max(0, min(turn.next.shared, turn.next.prompt - self.settings.xi_blocks))
