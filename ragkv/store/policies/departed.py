"""Groups of which nothing is held: what is known of them outlives their blocks, but not for ever.

A turn is reported before its blocks come, and a block that is refused leaves its group empty: the next block must still
be judged by that turn. So knowledge goes only when `MOST` other groups have left since.
"""

from collections import OrderedDict
from collections.abc import Callable

MOST = 100_000


class Departed:
    """The groups that left, the last `MOST` of them; the others are handed to `forget`."""

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
