"""Groups in order of a rank that changes: a heap whose stale entries are dropped when they reach the top."""

from collections.abc import Container
from heapq import heapify, heappop, heappush

Rank = tuple[float, int]  # the lowest is evicted first; the second number breaks ties

LAST: Rank = (float("inf"), 0)


class Ranking:
    """Finds the lowest-ranked group in O(log n)."""

    def __init__(self) -> None:
        self._rank: dict[str, Rank] = {}
        self._heap: list[tuple[Rank, str]] = []

    def __contains__(self, group: object) -> bool:
        return group in self._rank

    def __bool__(self) -> bool:
        return bool(self._rank)

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

    def first(self, pinned: Container[str] = ()) -> tuple[Rank, str] | None:
        """The lowest rank among the groups that are not pinned, and its group, or `None`."""
        heap, passed, found = self._heap, [], None
        while heap and found is None:
            rank, group = heap[0]
            if self._rank.get(group) != rank:
                heappop(heap)
            elif group in pinned:
                passed.append(heappop(heap))
            else:
                found = heap[0]
        for entry in passed:
            heappush(heap, entry)
        return found

    def first_two(self, pinned: Container[str] = ()) -> tuple[tuple[Rank, str] | None, Rank]:
        """The first, and the rank of the second (infinite if there is none)."""
        first = self.first(pinned)
        if first is None:
            return None, LAST
        popped = heappop(self._heap)
        second = self.first(pinned)
        heappush(self._heap, popped)
        return first, second[0] if second is not None else LAST
