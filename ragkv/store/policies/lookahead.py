"""Look-ahead eviction (CachedAttention section 3.3.2): who waits in the scheduler's queue is not evicted.

The unit is a session: all of it goes or none. Sessions among the first `window_groups` waiting requests are exempt; the
others go least recently used first. If all are exempt, the one that waits nearest the queue's tail goes. The window is
`(C_mem + C_disk) / S_kv` sessions; with a short queue this is LRU.
"""

from collections import OrderedDict, deque
from collections.abc import Container

from .base import Cut, PolicySettings, Turn
from .lru import LRU, first_unpinned
from .ranking import Ranking


class LookAhead(LRU):
    """LRU among the sessions outside the window; then the last inside it."""

    name = "lookahead"

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._outside: OrderedDict[str, int] = OrderedDict()  # held and not exempt, the last used last
        self._inside = Ranking()  # held and exempt, the last to be served first
        self._places: dict[str, deque[int]] = {}  # exempt group -> numbers of its requests inside the window
        self._beyond: deque[str] = deque()  # requests that wait behind the window
        self._joined = self._left = 0  # requests that ever entered the window, and that were started

    def queued(self, group: str) -> None:
        self._beyond.append(group)
        self._fill_window()

    def started(self, group: str) -> None:
        places = self._places.get(group)
        if places is None:
            return
        self._left += 1
        places.popleft()
        if not places:
            del self._places[group]
        self._settle(group)
        self._fill_window()

    def served(self, turn: Turn) -> None:
        self.used(turn.group, turn.at)

    def used(self, group: str, now: float) -> None:
        super().used(group, now)
        if group in self._outside:
            self._outside.move_to_end(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._held.get(group, 0)
        super().held(group, blocks, size, now)
        if grown or not blocks:
            self._settle(group)

    def victim(self, pinned: Container[str], now: float) -> Cut | None:
        group = first_unpinned(self._outside, pinned)
        if group is None:
            last = self._inside.first(pinned)
            group = None if last is None else last[1]
        return None if group is None else Cut(group, whole=True)

    def _fill_window(self) -> None:
        window = self.settings.window_groups
        while self._beyond and (window is None or self._joined - self._left < window):
            group = self._beyond.popleft()
            self._places.setdefault(group, deque()).append(self._joined)
            self._joined += 1
            self._settle(group)

    def _settle(self, group: str) -> None:
        """Put a group where it belongs: outside the window as the last used, inside it by its first place."""
        places = self._places.get(group)
        self._outside.pop(group, None)
        if group not in self._held or not places:
            self._inside.drop(group)
        if group in self._held and places:
            self._inside.put(group, (-places[0], 0))
        elif group in self._held:
            self._outside[group] = 0
