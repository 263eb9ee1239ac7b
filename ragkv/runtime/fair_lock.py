"""A lock that is fair to tenants. A `FairLock` is held by one thread, and a
`TimeShareQueue` decides which thread is next. Pure Python.

The tenant that has held the lock for the least time gets it next, and the requests of one tenant
are served in their order (start-time fair queueing). So a tenant with one request waits for one
batch of another tenant, however many requests that tenant has. An urgent wait goes before other
waits of the same tenant. It never goes before another tenant's wait: otherwise a busy tenant could
starve the searches of all others.

A plain lock is not enough for a model. A waiting thread must be able to leave the queue, because
another thread has done its work (`dismiss`). A holder must be able to let another tenant go first
in the middle of its work (`give_way`). Otherwise that tenant would wait for all that the holder
sent.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from .waiting import POLL_S, Check, no_check

T = TypeVar("T")

# How long a tenant is served before another one is due that used less.
QUANTUM_S = 0.02


class TimeShareQueue(Generic[T]):
    """Waiting items. The next one is the oldest of the tenant that used least. Not thread-safe,
    except `bool`.
    """

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[T]] = OrderedDict()  # by tenant; none is empty
        # What each tenant used, in seconds. A tenant that comes back starts at the level of the
        # others: it gets no credit for the time in which it was away.
        self._used_s: dict[str, float] = {}
        self._level_s = 0.0  # what the tenant that was served last had used when it began

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __bool__(self) -> bool:
        """Whether an item waits. Another thread may change the queue meanwhile: counting would then
        raise.
        """
        return bool(self._items)

    @property
    def tenants(self) -> set[str]:
        """The tenants of waiting items."""
        return set(self._items)

    def add(self, tenant: str, item: T, before: Callable[[T], bool] = lambda _: False) -> None:
        """Add an item of `tenant`: before its first item for which `before` is true, or as its
        last.
        """
        if tenant not in self._items:
            self._used_s[tenant] = self._used(tenant)
        items = self._items.setdefault(tenant, deque())
        items.insert(
            next((place for place, other in enumerate(items) if before(other)), len(items)), item
        )

    def remove(self, tenant: str, item: T) -> bool:
        """Remove an item; whether it was here."""
        items = self._items.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._items[tenant]
        return True

    def take(self) -> tuple[str, T]:
        """Remove and return the next item and its tenant. There must be one."""
        tenant = min(self._items, key=self._used)
        item = self._items[tenant][0]
        self.begin(tenant)
        self.remove(tenant, item)
        return tenant, item

    def begin(self, tenant: str) -> None:
        """`tenant` is served from now on."""
        self._level_s = max(self._level_s, self._used(tenant))
        self._used_s = {
            one: used_s
            for one, used_s in self._used_s.items()
            if used_s > self._level_s or one in self._items
        }

    def charge(self, tenant: str, seconds: float) -> None:
        """`tenant` used `seconds`."""
        self._used_s[tenant] = self._used(tenant) + seconds

    def is_due(self, tenant: str, seconds: float) -> bool:
        """Whether another tenant waits that used less than `tenant`, which has been served for
        `seconds` now.
        """
        used_s = self._used(tenant) + seconds - QUANTUM_S
        return any(self._used(other) < used_s for other in self._items if other != tenant)

    def _used(self, tenant: str) -> float:
        return max(self._used_s.get(tenant, 0.0), self._level_s)


class Wait:
    """One attempt to get a lock, for a tenant."""

    def __init__(self, tenant: str = "", urgent: bool = False) -> None:
        self.tenant = tenant
        self.urgent = urgent
        self.thread = threading.get_ident()  # that waits
        self.over = threading.Event()  # set when the wait ends
        self.granted = False
        self.dismissed = False


class FairLock:
    """A thread that releases the lock hands it to the tenant that used least; urgent waits overtake
    others of theirs.
    """

    def __init__(
        self,
        leaving: Callable[[], object] = lambda: None,
        entering: Callable[[], object] = lambda: None,
    ) -> None:
        """A thread calls `leaving` before it waits for the lock and before it hands the lock on. It
        calls `entering` as soon as it holds the lock. Neither raises.
        """
        self._leaving = leaving
        self._entering = entering
        self._guard = threading.Lock()
        self._holder: Wait | None = None
        self._since = 0.0  # the holder is charged for the time from then on
        self._waiting = TimeShareQueue[Wait]()

    @property
    def held(self) -> bool:
        """Whether a thread holds the lock."""
        return self._holder is not None

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        holder = self._holder
        return holder is not None and holder.thread == threading.get_ident()

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        with self._guard:
            return len(self._waiting)

    @property
    def tenants(self) -> set[str]:
        """The tenants of the thread that holds the lock and of those that wait."""
        with self._guard:
            return self._waiting.tenants | ({self._holder.tenant} if self._holder else set())

    @contextmanager
    def hold(
        self, tenant: str = "", *, urgent: bool = False, check: Check = no_check
    ) -> Iterator[None]:
        """Hold the lock inside the block, for `tenant`. What `check` raises ends the wait."""
        self.acquire(Wait(tenant, urgent), check)
        try:
            yield
        finally:
            self.release()

    def acquire(
        self, wait: Wait | None = None, check: Check = no_check, *, waits: bool = True
    ) -> bool:
        """Get the lock, waiting for it if `waits`. Returns whether this thread holds it: `False` if
        it would have to wait, or if `wait` was dismissed.

        `check` is called repeatedly while this thread waits; an error that it raises ends the wait.
        """
        wait = wait or Wait()
        try:
            with self._guard:
                if wait.dismissed or (self._holder is not None and not waits):
                    return False
                if self._holder is None:
                    self._waiting.begin(wait.tenant)
                    self._grant(wait)
                else:
                    self._waiting.add(
                        wait.tenant, wait, lambda other: wait.urgent and not other.urgent
                    )
            if not wait.granted:
                self._leaving()
            while not wait.over.wait(None if check is no_check else POLL_S):
                check()
            if wait.granted:
                self._entering()
        # the wait was interrupted: never grant the lock to a thread that has left
        except BaseException:
            self.dismiss((wait,))
            if wait.granted:
                self.release()
            raise
        return wait.granted

    def release(self, coming_back: bool = False) -> None:
        """Hand the lock on; without `leaving` if this thread is `coming_back` soon and alone."""
        if not coming_back:
            self._leaving()
        with self._guard:
            self._hand_on()

    def give_way(self) -> None:
        """Let tenants that used less go first, then hold the lock again. The holder calls this."""
        if not self._waiting:  # read without a lock: usually no other thread waits
            return
        with self._guard:
            wait = self._holder
            assert wait is not None
            if not self._waiting.is_due(wait.tenant, time.monotonic() - self._since):
                return
            wait.granted = False
            wait.over.clear()
            self._waiting.add(wait.tenant, wait, lambda _: True)
            self._hand_on()
        self._leaving()
        try:
            wait.over.wait()
        except BaseException:  # interrupted: the caller releases the lock, so it must have it
            wait.over.wait()
            raise
        self._entering()

    def share(self, tenants: Collection[str], seconds: float) -> None:
        """Charge the holder's last `seconds` to `tenants`, which names a tenant for each row."""
        with self._guard:
            assert self._holder is not None
            for tenant in tenants:
                self._waiting.charge(tenant, seconds / len(tenants))
            self._since += seconds

    def dismiss(self, waits: Iterable[Wait]) -> None:
        """End these waits without the lock: their work is done. They may not have begun yet."""
        with self._guard:
            for wait in waits:
                wait.dismissed = True
                self._waiting.remove(wait.tenant, wait)
                wait.over.set()

    def _grant(self, wait: Wait) -> None:
        """The caller holds `_guard`."""
        self._holder = wait
        self._since = time.monotonic()
        wait.granted = True
        wait.over.set()

    def _hand_on(self) -> None:
        """Charge the holder, and grant the lock to the next thread. The caller holds
        `_guard`.
        """
        assert self._holder is not None
        used_s = max(0.0, time.monotonic() - self._since)
        self._waiting.charge(self._holder.tenant, used_s)
        self._holder = None
        if self._waiting:
            self._grant(self._waiting.take()[1])
