"""What several policies keep of groups: their order by a rank that changes, and which ones have
left.
"""

from collections import OrderedDict
from collections.abc import Callable, Container
from heapq import heapify, heappop, heappush

Rank = tuple[float, int]  # the lowest is evicted first; the second number breaks ties

MOST_DEPARTED = 100_000  # So many groups that have left are remembered.


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


class Departed:
    """The last `MOST_DEPARTED` groups of which nothing is held; calls `forget` for those that left
    earlier.

    What a policy knows of a group outlives its blocks: a turn is reported before its blocks come,
    and a refused block leaves its group empty, but the next block must still be judged by that
    turn.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._groups: OrderedDict[str, None] = OrderedDict()

    def add(self, group: str) -> None:
        """Nothing of `group` is held now."""
        self._groups[group] = None
        self._groups.move_to_end(group)
        if len(self._groups) > MOST_DEPARTED:
            self._forget(self._groups.popitem(last=False)[0])

    def discard(self, group: str) -> None:
        """Something of `group` is held again."""
        self._groups.pop(group, None)
