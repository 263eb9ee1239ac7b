"""Waiting items of several tenants, taken from the tenants in turns."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out for each tenant; the tenants take turns. Not safe for threads."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[T]] = OrderedDict()  # the next tenant first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def add(self, tenant: str, item: T) -> None:
        """Append an item of `tenant`."""
        self._by_tenant.setdefault(tenant, deque()).append(item)

    def take(self, may_take: Callable[[str], bool]) -> tuple[str, T] | None:
        """Remove the oldest item of the next tenant for which `may_take` is true; `None` if there is none."""
        for tenant, items in self._by_tenant.items():
            if may_take(tenant):
                item = items[0]
                self.remove(tenant, item)
                if tenant in self._by_tenant:
                    self._by_tenant.move_to_end(tenant)
                return tenant, item
        return None

    def remove(self, tenant: str, item: T) -> bool:
        """Remove an item; whether it was here."""
        items = self._by_tenant.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._by_tenant[tenant]
        return True

    def clear(self) -> list[T]:
        """Remove all items and return them."""
        items = [item for queue in self._by_tenant.values() for item in queue]
        self._by_tenant.clear()
        return items
