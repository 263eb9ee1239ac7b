"""The model, for one pass at a time, first come first served.

A plain lock will not do: a request that waits for one token must be able to leave the line as soon as somebody else has
decoded it, and a prefill must not starve behind requests that come back for every token.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable

from . import teams

POLL_S = 0.02  # how often who may be called off looks whether it was


class Waiter:
    """A place in the line, for one acquisition."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.granted = False
        self.excused = False


class Compute:
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
            teams.give_back()  # whatever the caller computed before: another one computes now
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
            teams.give_back()
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
