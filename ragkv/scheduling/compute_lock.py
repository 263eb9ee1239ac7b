"""The model, for one pass at a time, first come first served.

A plain lock will not do: a request that waits for one token must be able to leave the line as soon as somebody else has
decoded it, and a prefill must not starve behind requests that come back for every token.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ragkv.errors import RagKVError
from ragkv.runtime import openmp

POLL_S = 0.02  # how often who may be called off looks whether it was


class Waiter:
    """A place in the line, for one acquisition."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.granted = False
        self.excused = False


class ComputeLock:
    """A fair lock: whoever releases it hands it to the first in line."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._line: deque[Waiter] = deque()

    def acquire(self, waiter: Waiter | None = None, check: Callable[[], None] | None = None) -> bool:
        """Wait for the model and have it: `True`; or `False` if `waiter` was excused instead.

        `check` is called now and then; what it raises ends the wait.
        """
        waiter = waiter or Waiter()
        try:
            with self._guard:
                if waiter.excused:
                    return False
                if not self._held:
                    self._held = waiter.granted = True
                    return True
                self._line.append(waiter)
            openmp.release_threads()  # whatever the caller computed before: another one computes now
            while not waiter.called.wait(None if check is None else POLL_S):
                if check is not None:
                    check()
        except BaseException:  # interrupted: nobody may hand the model to who is gone
            self.excuse((waiter,))
            if waiter.granted:
                self.release()
            raise
        return waiter.granted

    def release(self, keep_team: bool = False) -> None:
        """Hand the model on. `keep_team` is for who is about to come back, and seems to be the only one."""
        if not keep_team:
            openmp.release_threads()
        with self._guard:
            if not self._line:
                self._held = False
                return
            first = self._line.popleft()
            first.granted = True
            first.called.set()

    def excuse(self, waiters: Iterable[Waiter]) -> None:
        """Let those who wait, or are about to, go without the model: what they wanted it for is done."""
        with self._guard:
            for waiter in waiters:
                waiter.excused = True
                if waiter in self._line:
                    self._line.remove(waiter)
                waiter.called.set()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Traffic:
    """Requests under way on one model, whichever engine has them."""

    def __init__(self) -> None:
        self.requests = 0
        self.changed = threading.Condition()


class Activity:
    """Who is using the model: requests, which go first, and background work, which waits for a gap."""

    def __init__(self, beside: "Activity | None" = None) -> None:
        """Another engine's on the model of `beside`: the two take turns, and each is closed by itself."""
        self.lock: ComputeLock = beside.lock if beside else ComputeLock()  # one pass at a time
        self._traffic: Traffic = beside._traffic if beside else Traffic()
        self._closed = False

    @contextmanager
    def acquire_compute_lock(self, check: Callable[[], None] | None = None) -> Iterator[None]:
        """The model, alone. Raises `RagKVError` once closed, and what `check` raises while it waits."""
        self.lock.acquire(check=check)
        try:
            if self._closed:
                raise RagKVError("The engine is closed; build a new one.")
            yield
        finally:
            self.lock.release()

    def close(self) -> None:
        """Let the pass under way end, and none begin."""
        with self.lock:
            self._closed = True

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request in and out."""
        traffic = self._traffic
        with traffic.changed:
            traffic.requests += 1
        try:
            yield
        finally:
            with traffic.changed:
                traffic.requests -= 1
                traffic.changed.notify_all()

    def wait_idle(self, timeout_s: float, hurried: Callable[[], bool]) -> None:
        """Return when no request runs, when `hurried` says so after a `wake`, or after `timeout_s`."""
        with self._traffic.changed:
            self._traffic.changed.wait_for(lambda: self._traffic.requests == 0 or hurried(), timeout_s)

    def wake(self) -> None:
        """Let who waits look again whether to hurry."""
        with self._traffic.changed:
            self._traffic.changed.notify_all()


__all__ = ["Activity", "ComputeLock", "Waiter"]
