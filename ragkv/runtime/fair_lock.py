"""A lock that is fair to owners: its next holder is of the owner that held it for the least time, and first come first
served for one owner (`time_shares.py`).

A plain lock is not enough for a model. A thread that waits must be able to leave the queue because another thread has
done its work (`dismiss`), and a holder must be able to let another owner go first in the middle of its work
(`give_way`), so that nobody waits for all that another one sent. Pure Python.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from .batches import Check, may_be_urgent, no_check
from .time_shares import TimeShareQueue, current_owner

POLL_S = 0.02  # `POLL_S` is how often `check` is called while a thread waits: a thread cannot wait for two events.


class Wait:
    """One attempt to get a lock, for the owner of this thread's work."""

    def __init__(self, urgent: bool = False) -> None:
        self.owner, self.urgent = current_owner(), urgent and may_be_urgent()
        self.over = threading.Event()  # set when the wait ends
        self.granted = False
        self.dismissed = False


class FairLock:
    """A thread that releases the lock hands it to the next one: to urgent ones first, then by shares of time."""

    def __init__(self, leaving: Callable[[], object] = lambda: None) -> None:
        """`leaving` is called by a thread that has to wait, and by one that is about to hand the lock on."""
        self._leaving = leaving
        self._guard = threading.Lock()
        self._holder: Wait | None = None
        self._since = 0.0  # the holder is charged for the time from then on
        self._urgent, self._others = TimeShareQueue[Wait](), TimeShareQueue[Wait]()

    @property
    def held(self) -> bool:
        """Whether a thread holds the lock."""
        return self._holder is not None

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        with self._guard:
            return len(self._urgent) + len(self._others)

    @contextmanager
    def hold(self, urgent: bool = False, check: Check = no_check) -> Iterator[None]:
        """Hold the lock inside the block. What `check` raises ends the wait for it."""
        self.acquire(Wait(urgent), check)
        try:
            yield
        finally:
            self.release()

    def acquire(self, wait: Wait | None = None, check: Check = no_check) -> bool:
        """Wait for the lock. `True` once it is granted; `False` if `wait` was dismissed instead.

        `check` is called repeatedly while this thread waits; an error that it raises ends the wait.
        """
        wait = wait or Wait()
        try:
            with self._guard:
                if wait.dismissed:
                    return False
                if self._holder is None:
                    self._queue_of(wait).begin(wait.owner)
                    self._grant(wait)
                    return True
                self._queue_of(wait).add(wait.owner, wait)
            self._leaving()
            while not wait.over.wait(None if check is no_check else POLL_S):
                check()
        except BaseException:  # the wait was interrupted: never grant the lock to a thread that has left
            self.dismiss((wait,))
            if wait.granted:
                self.release()
            raise
        return wait.granted

    def release(self, coming_back: bool = False) -> None:
        """Hand the lock on. `coming_back`: `leaving` is not called, because this thread will be back soon and alone."""
        if not coming_back:
            self._leaving()
        with self._guard:
            self._hand_on()

    def give_way(self) -> None:
        """Let owners that used less go first, and wait for the lock again; the holder calls this at a good moment."""
        if not self._others:  # read without a lock: usually no other thread waits
            return
        with self._guard:
            wait = self._holder
            assert wait is not None
            if not self._queue_of(wait).is_due(wait.owner, time.monotonic() - self._since):
                return
            wait.granted = False
            wait.over.clear()
            self._queue_of(wait).add(wait.owner, wait, first=True)
            self._hand_on()
        self._leaving()
        try:
            wait.over.wait()
        except BaseException:  # interrupted: the caller releases the lock, so it must have it
            wait.over.wait()
            raise

    def share(self, owners: Collection[str], seconds: float) -> None:
        """The last `seconds` were used for `owners`, an owner being named once for each row; the holder calls this."""
        with self._guard:
            assert self._holder is not None
            for owner in owners:
                self._queue_of(self._holder).charge(owner, seconds / len(owners))
            self._since += seconds

    def dismiss(self, waits: Iterable[Wait]) -> None:
        """End these waits without the lock, because their work is done. They may not have begun yet."""
        with self._guard:
            for wait in waits:
                wait.dismissed = True
                self._queue_of(wait).remove(wait.owner, wait)
                wait.over.set()

    def _queue_of(self, wait: Wait) -> TimeShareQueue[Wait]:
        return self._urgent if wait.urgent else self._others

    def _grant(self, wait: Wait) -> None:
        """Needs `_guard`."""
        self._holder, self._since = wait, time.monotonic()
        wait.granted = True
        wait.over.set()

    def _hand_on(self) -> None:
        """Charge the holder, and grant the lock to the next thread. Needs `_guard`."""
        assert self._holder is not None
        used_s = max(0.0, time.monotonic() - self._since)
        self._queue_of(self._holder).charge(self._holder.owner, used_s)
        self._holder = None
        if queue := self._urgent or self._others:
            self._grant(queue.take()[1])


__all__ = ["FairLock", "Wait"]
