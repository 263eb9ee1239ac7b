"""Fair shares of something that one thread uses at a time: whose work a thread does, and who is next.

A server says with `working_for` for which tenant a thread works. Who used least is next, so a tenant with one request
waits for one batch of another tenant, however many of its requests wait (start-time fair queueing). Pure Python.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM_S = 0.02  # an owner is served for so long before another one is due that used less

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
    """For whom this thread works; "" if nobody said so."""
    return getattr(_thread, "owner", "")


class TimeShareQueue(Generic[T]):
    """Waiting items. The next one is the oldest of the owner that used least. Not safe for threads."""

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}  # by owner; none is empty
        # What each owner used, in seconds. An owner that was away starts where the others are: it is not owed the time.
        self._used_s: dict[str, float] = {}
        self._level_s = 0.0  # what the owner that was served last had used when it began

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def add(self, owner: str, item: T, *, first: bool = False) -> None:
        """Add an item of `owner`, in front of its others if it is to be `first`."""
        if owner not in self._items:
            self._items[owner] = deque()
            self._used_s[owner] = self._used(owner)
        if first:
            self._items[owner].appendleft(item)
        else:
            self._items[owner].append(item)

    def take(self) -> tuple[str, T]:
        """Remove and return the next item and its owner. There must be one."""
        owner = min(self._items, key=self._used)
        item = self._items[owner][0]
        self.begin(owner)
        self.remove(owner, item)
        return owner, item

    def remove(self, owner: str, item: T) -> bool:
        """Remove an item; whether it was here."""
        items = self._items.get(owner)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._items[owner]
        return True

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
