"""A queue that is fair to the owners of its items, and the owner of a thread's work.

An owner is a tenant of a server; `working_for` tells a thread for which one it works. `TimeShareQueue` is for something
that one thread uses at a time: the owner that used least time is next, so a tenant with one request waits for one batch
of another tenant, however many requests the other one has (start-time fair queueing). Pure Python.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM_S = 0.02  # `QUANTUM_S` is how long an owner is served before another one is due that used less.

_thread = threading.local()


@contextmanager
def working_for(owner: str) -> Iterator[None]:
    """Inside the block, what this thread waits for and uses counts for `owner`."""
    before, _thread.owner = current_owner(), owner
    try:
        yield
    finally:
        _thread.owner = before


def current_owner() -> str:
    """The owner for which this thread works; "" outside `working_for`."""
    return getattr(_thread, "owner", "")


class TimeShareQueue(Generic[T]):
    """Waiting items. The next one is the oldest of the owner that used least. Not safe for threads, but for `bool`."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[T]] = OrderedDict()  # by owner; none is empty
        # What each owner used, in seconds. An owner that was away starts where the others are: it is not owed the time.
        self._used_s: dict[str, float] = {}
        self._level_s = 0.0  # what the owner that was served last had used when it began

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __bool__(self) -> bool:
        """Whether an item waits. Another thread may change the queue meanwhile: counting would then raise."""
        return bool(self._items)

    def add(self, owner: str, item: T, *, first: bool = False) -> None:
        """Add an item of `owner`, in front of its others if it is to be `first`."""
        if owner not in self._items:
            self._used_s[owner] = self._used(owner)
        items = self._items.setdefault(owner, deque())
        items.appendleft(item) if first else items.append(item)

    def remove(self, owner: str, item: T) -> bool:
        """Remove an item; whether it was here."""
        items = self._items.get(owner)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._items[owner]
        return True

    def take(self) -> tuple[str, T]:
        """Remove and return the next item and its owner. There must be one."""
        owner = min(self._items, key=self._used)
        item = self._items[owner][0]
        self.begin(owner)
        self.remove(owner, item)
        return owner, item

    def begin(self, owner: str) -> None:
        """`owner` is served from now on."""
        self._level_s = max(self._level_s, self._used(owner))
        self._used_s = {
            one: used_s for one, used_s in self._used_s.items() if used_s > self._level_s or one in self._items
        }

    def charge(self, owner: str, seconds: float) -> None:
        """`owner` used so much."""
        self._used_s[owner] = self._used(owner) + seconds

    def is_due(self, owner: str, seconds: float) -> bool:
        """Whether another owner waits that used less than `owner`, which has been served for `seconds` now."""
        used_s = self._used(owner) + seconds - QUANTUM_S
        return any(self._used(other) < used_s for other in self._items if other != owner)

    def _used(self, owner: str) -> float:
        return max(self._used_s.get(owner, 0.0), self._level_s)


__all__ = ["TimeShareQueue", "current_owner", "working_for"]
