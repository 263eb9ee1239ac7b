"""The offline bounds: Belady's furthest-in-future rule, and tail-optimized Belady (T-LRU paper, theorem 1)."""

from collections.abc import Container, Iterable

from .base import NEVER, Cut, Policy, PolicySettings, Turn
from .departed import Departed
from .ranking import Ranking


class Belady(Policy):
    """Evicts the conversation whose next request is furthest; those that never return first.

    A group whose future nobody told counts as never returning, the longest unused first. Where conversations contract,
    blocks that the next prompt does not share still count as needed; `tail-belady` with xi 0 knows better.
    """

    name = "belady"
    offline = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._next: dict[str, tuple[int, int]] = {}  # group -> (-position of its next request, number of its last use)
        self._held = Ranking()
        self._uses = 0
        self._departed = Departed(self._forget)

    def served(self, turn: Turn) -> None:
        self._expect(turn.group, (turn.next or NEVER).position)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._expect(group, -self._next[group][0])

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        if not blocks:
            self._held.drop(group)
            if group in self._next:
                self._departed.add(group)
        elif group not in self._held:
            if group not in self._next:
                self._expect(group, NEVER.position)
            self._held.put(group, self._next[group])
            self._departed.discard(group)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        first = self._held.first(pinned)
        return None if first is None else Cut(first[1])

    def _forget(self, group: str) -> None:
        del self._next[group]

    def _expect(self, group: str, position: int) -> None:
        self._uses += 1
        self._next[group] = -position, self._uses
        if group in self._held:
            self._held.put(group, self._next[group])
        else:
            self._departed.add(group)


class TailBelady(Belady):
    """Belady, of no more blocks than serve the tail: min(sh_next, (in_next - xi)+). Optimal for TEL."""

    name = "tail-belady"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._cut: Cut | None = None  # of the conversation served last

    def served(self, turn: Turn) -> None:
        super().served(turn)
        self._cut = None
        if turn.next is not None:
            keep = max(0, min(turn.next.shared, turn.next.prompt - self.settings.xi_blocks))
            self._cut = Cut(turn.group, keep, whole=True)

    def trims(self, overflows: bool, now: float) -> Iterable[Cut]:
        return () if self._cut is None else (self._cut,)
