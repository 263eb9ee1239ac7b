"""Waiting items of several tenants, taken from the tenants in turns."""

from collections.abc import Callable
from typing import TypeVar

from ragkv.runtime import OwnerQueues

T = TypeVar("T")


class FairQueue(OwnerQueues[T]):
    """First in, first out for each tenant; the tenants take turns. Not safe for threads."""

    def take(self, may_take: Callable[[str], bool]) -> tuple[str, T] | None:
        """Remove the oldest item of the next tenant for which `may_take` is true; `None` if there is none."""
        for tenant, items in self._items.items():
            if may_take(tenant):
                item = items[0]
                self.remove(tenant, item)
                if tenant in self._items:
                    self._items.move_to_end(tenant)
                return tenant, item
        return None
