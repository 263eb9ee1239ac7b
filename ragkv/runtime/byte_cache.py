"""A cache of values by key, limited by the bytes of all values together.

Clients choose how large keys and values are, so a limit on their number would bound nothing. Pure
Python.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Bytes of an object and its place in a table, besides what they hold.
OVERHEAD_BYTES = 512


class ByteCache(Generic[K, V]):
    """The values that were used last."""

    def __init__(self, limit_bytes: int) -> None:
        """Keys and values together take `limit_bytes` at most."""
        self._limit = limit_bytes
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self.used_bytes = 0

    def get(self, key: K) -> V | None:
        """The value of `key`, if it is kept."""
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        """Keep a value, and give up those that were not used for longest. A value larger than the
        whole cache is not kept.
        """
        size_bytes += OVERHEAD_BYTES
        with self._lock:
            if size_bytes > self._limit or key in self._held:
                return
            self._held[key] = value, size_bytes
            self.used_bytes += size_bytes
            while self.used_bytes > self._limit:
                self.used_bytes -= self._held.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget every value."""
        with self._lock:
            self._held.clear()
            self.used_bytes = 0


def cached_by_bytes(
    make: Callable[[str], V], limit_bytes: int, copies: int = 2
) -> Callable[[str], V]:
    """`make`, whose last values are kept. A value takes `copies` times the bytes of its key."""
    cache = ByteCache[str, V](limit_bytes)

    def made(key: str) -> V:
        if (found := cache.get(key)) is None:
            found = make(key)
            cache.put(key, found, (1 + copies) * len(key))
        return found

    return made
