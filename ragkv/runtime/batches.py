"""Long work in batches: what it calls before each batch. Pure Python."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Check = Callable[[], None]  # called before each batch; it may wait, and raises to end the work

# `POLL_S` is how often `check` is called while a thread waits, which cannot wait for two events.
# Many threads may wait.
POLL_S = 0.1


def no_check() -> None:
    """The check of work that nothing ends."""


@dataclass(frozen=True, slots=True)
class PausingCheck:
    """A check that lets other work go first. Whoever holds a lock asks `stop_of` it."""

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
