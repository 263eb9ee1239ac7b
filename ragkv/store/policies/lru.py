"""Least recently used: the CacheBlend paper's policy (section 5.1) and the baseline of every other."""

from collections import OrderedDict
from collections.abc import Container

from .base import Item, Policy


class LRU(Policy):
    """Evicts what was not used for longest; insertion counts as a use."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def inserted(self, item: Item, now: float) -> None:
        self._order[item.key] = None
        self._order.move_to_end(item.key)

    def used(self, key: str, now: float) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: str) -> None:
        self._order.pop(key, None)

    def victim(self, pinned: Container[str], now: float) -> str | None:
        return next((key for key in self._order if key not in pinned), None)
