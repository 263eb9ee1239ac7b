"""The compute lock: one thread computes with the model at a time, first come first served.

A plain lock is not enough. A request that waits for one token must be able to leave the queue as soon as another thread
has decoded that token, and a prefill must not starve behind requests that come back for every token.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ragkv.errors import RagKVError
from ragkv.runtime import BatchLock, openmp

POLL_S = 0.02  # cancellation poll interval


class Waiter:
    """One attempt to acquire the lock."""

    def __init__(self) -> None:
        self.called = threading.Event()  # set when the wait is over
        self.granted = False
        self.dismissed = False


class ComputeLock:
    """A fair lock: a thread that releases it hands it to the first waiter in the queue."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[Waiter] = deque()
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
                if not self._held:
                    self._held = waiter.granted = True
                    return True
                self._queue.append(waiter)
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
            if not self._queue:
                self._held = False
                return
            first = self._queue.popleft()
            first.granted = True
            first.called.set()

    def dismiss(self, waiters: Iterable[Waiter]) -> None:
        """End the wait of `waiters` without the lock, because their work is done. They may not have queued yet."""
        with self._guard:
            for waiter in waiters:
                waiter.dismissed = True
                if waiter in self._queue:
                    self._queue.remove(waiter)
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
