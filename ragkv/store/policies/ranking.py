"""Groups in the order of a rank that changes."""

from collections.abc import Container
from heapq import heapify, heappop, heappush

Rank = tuple[float, int]  # the lowest is evicted first; the second number breaks ties


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

    def first(self, pinned: Container[str] = ()) -> tuple[Rank, str] | None:
        """The lowest rank among the groups that are not pinned, and its group, or `None`."""
        heap = self._heap
        passed = []
        found = None
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
