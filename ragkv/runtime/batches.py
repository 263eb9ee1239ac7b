"""Long work in batches: what it calls before each batch. Pure Python."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Check = Callable[[], None]  # called before each batch; it may wait, and raises to end the work

# `POLL_S` is how often `check` is called while a thread waits, which cannot wait for two events.
# Many threads may wait.
POLL_S = 0.1


def no_check() -> None:
    """The check of work that nothing ends."""


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


_thread = threading.local()


@contextmanager
def stopped_by(check: Check) -> Iterator[None]:
    """Inside the block, what `check` raises ends this thread's work also where it has no batches,
    as in a query.
    """
    before = getattr(_thread, "stop", no_check)
    _thread.stop = check
    try:
        yield
    finally:
        _thread.stop = before


def check_stopped() -> None:
    """Raise what the check of `stopped_by` raises."""
    getattr(_thread, "stop", no_check)()
