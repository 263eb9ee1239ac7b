"""Least recently used: the CacheBlend paper's policy (section 5.1) and the baseline of all others;
and the same with a look ahead into the scheduler's queue.
"""

from collections import OrderedDict, deque
from collections.abc import Container

from .base import Cut, Policy, PolicySettings, TurnSize


class LRU(Policy):
    """Evicts the group unused for longest; insertion counts as a use."""

    name = "lru"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        # group -> blocks, the most recently used last
        self._held: OrderedDict[str, int] = OrderedDict()

    def served(self, turn: TurnSize) -> None:
        self.used(turn.group, turn.at)

    def used(self, group: str, now: float) -> None:
        if group in self._held:
            self._held.move_to_end(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._held.get(group, 0)
        if blocks:
            self._held[group] = blocks
        else:
            self._held.pop(group, None)
        if grown:
            self._held.move_to_end(group)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        oldest = first_unpinned(self._held, pinned)
        return None if oldest is None else Cut(oldest)


class LookAhead(LRU):
    """Sessions that wait in the scheduler's queue are not evicted (CachedAttention section 3.3.2).

    The unit is a session: it is evicted whole. The first sessions of the queue, as many as the
    window has, are exempt; the others are evicted least recently used first. If all are exempt, the
    one that waits nearest the queue's tail is evicted. With a short queue this is LRU.

    The paper's window is `(C_mem + C_disk) / S_kv` sessions, as many as fit into both; the
    simulator states it (`window_groups`). In a live store the window is the whole queue, which is
    short. A window that exceeds the tiers is harmless: the sessions in excess stand at its tail, and
    the tail is evicted first.
    """

    name = "lookahead"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        # held and not exempt, the most recently used last
        self._outside: OrderedDict[str, int] = OrderedDict()
        # exempt group -> numbers of its requests inside the window
        self._positions: dict[str, deque[int]] = {}
        # requests that wait behind the window, and their numbers
        self._beyond: deque[tuple[str, int]] = deque()
        self._joined = 0  # requests that ever joined the queue

    def queued(self, group: str) -> None:
        self._beyond.append((group, self._joined))
        self._joined += 1
        self._fill_window()

    def left(self, group: str, position: int = 0) -> None:
        inside = self._positions.get(group, deque())
        if position < len(inside):
            del inside[position]
            if not inside:
                del self._positions[group]
            self._place(group)
            self._fill_window()
            return
        behind = [request for request in self._beyond if request[0] == group]
        if position - len(inside) < len(behind):
            self._beyond.remove(behind[position - len(inside)])

    def used(self, group: str, now: float) -> None:
        super().used(group, now)
        if group in self._outside:
            self._outside.move_to_end(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._held.get(group, 0)
        super().held(group, blocks, size, now)
        if grown or not blocks:
            self._place(group)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        group = first_unpinned(self._outside, pinned)
        if group is None:
            exempt = [one for one in self._positions if one in self._held and one not in pinned]
            group = max(exempt, key=lambda one: self._positions[one][0], default=None)
        return None if group is None else Cut(group, whole=True)

    def _fill_window(self) -> None:
        window = (
            float("inf") if self.settings.window_groups is None else self.settings.window_groups
        )
        while self._beyond and (
            self._beyond[0][0] in self._positions or len(self._positions) < window
        ):
            group, number = self._beyond.popleft()
            self._positions.setdefault(group, deque()).append(number)
            self._place(group)

    def _place(self, group: str) -> None:
        """Let a held group outside the window count as used now. Those inside have no order here."""
        self._outside.pop(group, None)
        if group in self._held and group not in self._positions:
            self._outside[group] = 0


def first_unpinned(groups: OrderedDict[str, int], pinned: Container[str]) -> str | None:
    """The first of `groups` that is not pinned, or `None`."""
    return next((group for group in groups if group not in pinned), None)
