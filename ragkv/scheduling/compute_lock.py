"""The compute lock: one thread computes with the model at a time, by shares of time, and for one owner in order.

A plain lock is not enough. A request that waits for one token must be able to leave the queue as soon as another thread
has decoded that token, and a prefill must not starve behind requests that come back for every token. A tenant of a
server must not wait for all that another one sent (`runtime/time_shares.py`): a prefill lets it go first between two
layers.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from ragkv.errors import RagKVError
from ragkv.runtime import BatchLock, TimeShareQueue, current_owner, openmp

POLL_S = 0.02  # cancellation poll interval


class Waiter:
    """One attempt to acquire the lock, for the owner of this thread's work."""

    def __init__(self) -> None:
        self.owner = current_owner()
        self.called = threading.Event()  # set when the wait is over
        self.granted = False
        self.dismissed = False


class ComputeLock:
    """A fair lock: a thread that releases it hands it to the next waiter in the queue."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holder: Waiter | None = None
        self._since = 0.0  # the holder is charged for the time from then on
        self._queue: TimeShareQueue[Waiter] = TimeShareQueue()
        self.encoding = BatchLock()  # held while one chunk is encoded, of any engine
        self.requests = 0  # requests under way on the model, of every engine that shares the lock
        self.requests_changed = threading.Condition()

    def acquire(self, waiter: Waiter | None = None, check: Callable[[], None] | None = None) -> bool:
        """Wait for the lock. `True` once it is acquired; `False` if `waiter` was dismissed instead.

        `check` is called repeatedly while this thread waits; an error that it raises ends the wait.
        """
        waiter = waiter or Waiter()
        try:
            with self._guard:
                if waiter.dismissed:
                    return False
                if self._holder is None:
                    self._queue.begin(waiter.owner)
                    self._grant(waiter)
                    return True
                self._queue.add(waiter.owner, waiter)
            openmp.release_threads()  # this thread may have computed before; now another thread computes
            while not waiter.called.wait(None if check is None else POLL_S):
                if check is not None:
                    check()
        except BaseException:  # the wait was interrupted: never grant the lock to a waiter that has left
            self.dismiss((waiter,))
            if waiter.granted:
                self.release()
            raise
        return waiter.granted

    def release(self, keep_threads: bool = False) -> None:
        """Hand the lock on. `keep_threads` if this thread will be back soon and seems to be the only one."""
        if not keep_threads:
            openmp.release_threads()
        with self._guard:
            self._hand_on()

    def give_way(self) -> None:
        """Let owners that used less go first, and wait for the lock again; the holder calls this at a good moment."""
        if not self._queue:  # read without a lock: usually no other thread waits
            return
        with self._guard:
            waiter = self._holder
            assert waiter is not None
            if not self._queue.is_due(waiter.owner, time.monotonic() - self._since):
                return
            waiter.granted = False
            waiter.called.clear()
            self._queue.add(waiter.owner, waiter, first=True)
            self._hand_on()
        openmp.release_threads()
        try:
            waiter.called.wait()
        except BaseException:  # interrupted: the caller releases the lock, so it must have it
            waiter.called.wait()
            raise

    def share(self, owners: Collection[str], seconds: float) -> None:
        """The last `seconds` were used for `owners`, an owner being named once for each row; the holder calls this."""
        with self._guard:
            for owner in owners:
                self._queue.charge(owner, seconds / len(owners))
            self._since += seconds

    def _grant(self, waiter: Waiter) -> None:
        """Needs `_guard`."""
        self._holder, self._since = waiter, time.monotonic()
        waiter.granted = True
        waiter.called.set()

    def _hand_on(self) -> None:
        """Charge the holder, and grant the lock to the next waiter. Needs `_guard`."""
        assert self._holder is not None
        self._queue.charge(self._holder.owner, max(0.0, time.monotonic() - self._since))
        self._holder = None
        if self._queue:
            self._grant(self._queue.take()[1])

    def dismiss(self, waiters: Iterable[Waiter]) -> None:
        """End the wait of `waiters` without the lock, because their work is done. They may not have queued yet."""
        with self._guard:
            for waiter in waiters:
                waiter.dismissed = True
                self._queue.remove(waiter.owner, waiter)
                waiter.called.set()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Activity:
    """One engine's use of the model: requests, which go first, and background work, which waits until they end."""

    def __init__(self, lock: ComputeLock | None = None) -> None:
        """`lock` is that of another engine on the same model: they compute in turns, and each is closed by itself."""
        self.lock = lock or ComputeLock()
        self._closed = False

    @contextmanager
    def acquire_compute_lock(self, check: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the compute lock. Raises `RagKVError` once closed, and what `check` raises while this thread waits."""
        self.lock.acquire(check=check)
        try:
            if self._closed:
                raise RagKVError("The engine is closed; build a new one.")
            yield
        finally:
            self.lock.release()

    def give_way(self) -> None:
        """Let owners that used less compute now; the thread that holds the compute lock calls this between layers.

        Raises `RagKVError` if the engine was closed meanwhile.
        """
        self.lock.give_way()
        if self._closed:
            raise RagKVError("The engine is closed; build a new one.")

    @contextmanager
    def acquire_for_encoding(self) -> Iterator[None]:
        """Hold the compute lock for one chunk. One thread at a time waits for it here, so a request waits for one."""
        with self.lock.encoding.hold(), self.acquire_compute_lock():
            yield

    def close(self) -> None:
        """Wait for the pass under way to end, and allow no other."""
        with self.lock:
            self._closed = True

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it runs."""
        self._add_requests(1)
        try:
            yield
        finally:
            self._add_requests(-1)

    def wait_idle(self, timeout_s: float, hurried: Callable[[], bool]) -> None:
        """Return when no request runs, when `hurried` is true after a `wake`, or after `timeout_s`."""
        with self.lock.requests_changed:
            self.lock.requests_changed.wait_for(lambda: self.lock.requests == 0 or hurried(), timeout_s)

    def wake(self) -> None:
        """Wake the threads in `wait_idle`, so that they check their flag again."""
        self._add_requests(0)

    def _add_requests(self, count: int) -> None:
        with self.lock.requests_changed:
            self.lock.requests += count
            self.lock.requests_changed.notify_all()


__all__ = ["Activity", "ComputeLock", "Waiter"]
