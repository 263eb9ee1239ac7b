"""Long work in batches: what it calls before each batch, and a lock for the batches of many threads. Pure Python."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """A lock that is handed on in the order in which threads came; urgent ones come first."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._urgent: deque[threading.Event] = deque()
        self._others: deque[threading.Event] = deque()

    @contextmanager
    def hold(self, urgent: bool = False, check: Check = no_check) -> Iterator[None]:
        """Hold the lock, for one batch: urgent threads wait until it ends. What `check` raises ends the wait."""
        urgent = urgent and not getattr(_thread, "never_urgent", False)
        turn, queue = threading.Event(), self._urgent if urgent else self._others
        with self._guard:
            if self._held:
                queue.append(turn)
            else:
                self._held = True
                turn.set()
        try:
            while not turn.wait(None if check is no_check else POLL_S):
                check()
        except BaseException:  # never grant the lock to a thread that has left
            with self._guard:
                left = turn in queue
                if left:
                    queue.remove(turn)
            if not left:
                self._release()
            raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._guard:
            queue = self._urgent or self._others
            if queue:
                queue.popleft().set()
            else:
                self._held = False


__all__ = ["BatchLock", "Check", "acquired", "never_urgent", "no_check"]
