"""Groups of which nothing is held any more: what a policy knows of them outlives their blocks, but is bounded.

A turn is reported before its blocks come, and a refused block leaves its group empty; the next block must still be
judged by that turn. So knowledge of a group is dropped only once `MOST` other groups have left after it.
"""

from collections import OrderedDict
from collections.abc import Callable

MOST = 100_000


class Departed:
    """The last `MOST` groups that left; calls `forget` for those that left earlier."""

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._groups: OrderedDict[str, None] = OrderedDict()

    def add(self, group: str) -> None:
        """Nothing of `group` is held now."""
        self._groups[group] = None
        self._groups.move_to_end(group)
        if len(self._groups) > MOST:
            self._forget(self._groups.popitem(last=False)[0])

    def discard(self, group: str) -> None:
        """Something of `group` is held again."""
        self._groups.pop(group, None)
