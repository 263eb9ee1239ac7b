"""What ends a wait. A `Check` is what work calls while it waits and before each batch, and a
`Claim` is a request's right to the model. Pure Python.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragkv.errors import CancelledError, DeadlineError

Check = Callable[[], None]  # called before each batch; it may wait, and raises to end the work

# How often a thread that waits calls its `check`: it cannot wait for two events at once. Not often,
# because many threads may wait.
POLL_S = 0.1


def no_check() -> None:
    """The check of work that nothing ends."""


@dataclass(frozen=True, slots=True)
class PausingCheck:
    """A check that lets other work go first, so it may wait. Code that holds a lock must not wait
    for others: it calls `stop_of(check)`.
    """

    pause: Check  # may wait, and raises what `stop` raises
    stop: Check  # never waits

    def __call__(self) -> None:
        self.pause()


def stop_of(check: Check) -> Check:
    """What raises as `check` does, and never waits: others may need what its caller holds."""
    return check.stop if isinstance(check, PausingCheck) else check


@contextmanager
def acquired(
    lock: "threading.Lock | threading.RLock | threading.Semaphore", check: Check
) -> Iterator[None]:
    """Hold `lock`; what `check` raises ends the wait for it."""
    while not lock.acquire(timeout=POLL_S):
        check()
    try:
        yield
    finally:
        lock.release()


class Claim:
    """One request's claim on the model. It is passed by hand to everything that waits or computes
    for the request.
    """

    def __init__(
        self,
        tenant: str = "",
        deadline_s: float | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """It begins now. `tenant` is charged for what is computed. The request is given up after
        `deadline_s` seconds, or when `cancel` is set.
        """
        self.tenant = tenant
        self._began = time.perf_counter()
        self._deadline_s = deadline_s
        self._cancel = cancel

    def elapsed_s(self) -> float:
        """Seconds since the work began."""
        return time.perf_counter() - self._began

    def check(self) -> None:
        """Raise `CancelledError` or `DeadlineError` if the request should not go on."""
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError(
                "The request was cancelled by its caller; what it held is released."
            )
        if self._deadline_s is not None and self.elapsed_s() >= self._deadline_s:
            raise DeadlineError(
                f"The request's deadline of {self._deadline_s:g} s passed; what it held is "
                "released. Give it more time, ask for fewer tokens, or ask again when the queue "
                "is shorter."
            )

    @property
    def is_over(self) -> bool:
        """Whether the request should not go on: `check` raises."""
        try:
            self.check()
        except (CancelledError, DeadlineError):
            return True
        return False

    def wait(self, event: threading.Event) -> None:
        """Wait for `event`; raises what `check` raises."""
        may_end = self._cancel is not None or self._deadline_s is not None
        while not event.wait(POLL_S if may_end else None):
            self.check()
