"""Long work in batches: what it calls before each batch, and a lock for the batches of many threads. Pure Python."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .time_shares import TimeShareQueue, current_owner

POLL_S = 0.05  # how often `check` is called while a thread waits for a lock
Check = Callable[[], None]  # called before each batch; it may wait, and raises to end the work


def no_check() -> None:
    """The check of work that nothing ends."""


@contextmanager
def acquired(lock: "threading.Lock | threading.RLock", check: Check) -> Iterator[None]:
    """Hold `lock`; what `check` raises ends the wait for it."""
    while not lock.acquire(timeout=-1 if check is no_check else POLL_S):
        check()
    try:
        yield
    finally:
        lock.release()


_thread = threading.local()


@contextmanager
def never_urgent() -> Iterator[None]:
    """Inside the block, this thread waits for locks as if it were not urgent: answers overtake it."""
    _thread.never_urgent = True
    try:
        yield
    finally:
        _thread.never_urgent = False


class BatchLock:
    """A lock that is handed on by shares of time, and for one owner in order; urgent threads come first."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._urgent, self._others = TimeShareQueue[threading.Event](), TimeShareQueue[threading.Event]()

    @contextmanager
    def hold(self, urgent: bool = False, check: Check = no_check) -> Iterator[None]:
        """Hold the lock, for one batch: urgent threads wait until it ends. What `check` raises ends the wait."""
        urgent = urgent and not getattr(_thread, "never_urgent", False)
        owner, turn, queue = current_owner(), threading.Event(), self._urgent if urgent else self._others
        with self._guard:
            if self._held:
                queue.add(owner, turn)
            else:
                self._held = True
                queue.begin(owner)
                turn.set()
        try:
            while not turn.wait(None if check is no_check else POLL_S):
                check()
        except BaseException:  # never grant the lock to a thread that has left
            with self._guard:
                left = queue.remove(owner, turn)
            if not left:
                self._release()
            raise
        began = time.monotonic()
        try:
            yield
        finally:
            with self._guard:
                queue.charge(owner, time.monotonic() - began)
            self._release()

    def _release(self) -> None:
        with self._guard:
            queue = self._urgent or self._others
            if queue:
                queue.take()[1].set()
            else:
                self._held = False


__all__ = ["BatchLock", "Check", "acquired", "never_urgent", "no_check"]
