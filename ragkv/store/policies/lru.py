"""Least recently used, the CacheBlend paper's policy (section 5.1) and the baseline of all others.
`lookahead` is LRU that also knows the scheduler's queue.
"""

from collections import OrderedDict
from collections.abc import Container
from heapq import heapify, heappop, heappush

from .base import Eviction, Policy
from .inputs import PolicySettings, TurnSize

Rank = tuple[float, int]  # the lowest is evicted first; the second number breaks ties


class LRU(Policy):
    """Evicts the group unused for longest; insertion counts as a use."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        # group -> blocks, the most recently used last
        self._held: OrderedDict[str, int] = OrderedDict()

    def turn_prefilled(self, turn: TurnSize) -> None:
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

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        oldest = first_unleased(self._held, leased)
        return None if oldest is None else Eviction(oldest)


class Ranking:
    """Finds the lowest-ranked group in O(log n): a heap whose stale entries are dropped when they
    reach the top.
    """

    def __init__(self) -> None:
        self._rank: dict[str, Rank] = {}
        self._heap: list[tuple[Rank, str]] = []

    def __contains__(self, group: object) -> bool:
        return group in self._rank

    def put(self, group: str, rank: Rank) -> None:
        """Add `group`, or change its rank."""
        self._rank[group] = rank
        heappush(self._heap, (rank, group))
        if len(self._heap) > 64 + 4 * len(self._rank):
            self._heap = [(rank, group) for group, rank in self._rank.items()]
            heapify(self._heap)

    def drop(self, group: str) -> None:
        """Remove `group`; unknown groups are ignored."""
        self._rank.pop(group, None)

    def first(self, leased: Container[str] = ()) -> tuple[Rank, str] | None:
        """The lowest rank among the groups that are not leased, and its group, or `None`."""
        heap = self._heap
        passed = []
        found = None
        while heap and found is None:
            rank, group = heap[0]
            if self._rank.get(group) != rank:
                heappop(heap)
            elif group in leased:
                passed.append(heappop(heap))
            else:
                found = heap[0]
        for entry in passed:
            heappush(heap, entry)
        return found


class LookAhead(LRU):
    """Sessions that wait in the scheduler's queue are not evicted (CachedAttention section 3.3.2).

    The unit is a session: it is evicted whole. The sessions of the queue are exempt; the others are
    evicted least recently used first. If all are exempt, the one that waits nearest the queue's
    tail is evicted. With a short queue this is LRU.

    In the paper only as many sessions are exempt as fit into memory and disk. Here all of the queue
    are. The result is the same, because the queue's tail is evicted first.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        # held and not exempt, the most recently used last
        self._outside: OrderedDict[str, int] = OrderedDict()
        # exempt group -> its requests, in the order in which they joined
        self._waiting: dict[str, OrderedDict[int, None]] = {}
        self._last = Ranking()  # held and exempt, the one nearest the tail first

    def queued(self, group: str, request: int) -> None:
        self._waiting.setdefault(group, OrderedDict())[request] = None
        self._rank(group)

    def left(self, group: str, request: int) -> None:
        requests = self._waiting.get(group)
        if requests is not None and request in requests:
            del requests[request]
            if not requests:
                del self._waiting[group]
            self._rank(group)

    def used(self, group: str, now: float) -> None:
        super().used(group, now)
        if group in self._outside:
            self._outside.move_to_end(group)

    def held(self, group: str, blocks: int, size: int, now: float) -> None:
        grown = blocks > self._held.get(group, 0)
        super().held(group, blocks, size, now)
        if grown or not blocks:
            self._rank(group)

    def victim(self, leased: Container[str], now: float) -> Eviction | None:
        group = first_unleased(self._outside, leased)
        if group is None:
            last = self._last.first(leased)
            group = None if last is None else last[1]
        return None if group is None else Eviction(group, whole=True)

    def _rank(self, group: str) -> None:
        """Rank a held group by its first request; without one it counts as used now."""
        self._outside.pop(group, None)
        self._last.drop(group)
        if group not in self._held:
            return
        if group in self._waiting:
            self._last.put(group, (-next(iter(self._waiting[group])), 0))
        else:
            self._outside[group] = 0


def first_unleased(groups: OrderedDict[str, int], leased: Container[str]) -> str | None:
    """The first of `groups` that is not leased, or `None`."""
    return next((group for group in groups if group not in leased), None)
