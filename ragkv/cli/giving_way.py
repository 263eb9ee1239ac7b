"""A long command gives way to a question: `ragkv ingest` pauses while `ragkv ask` answers from the same home.

Two processes that compute on the same few cores hinder each other far more than they share: on two cores an answer
took 83 s beside an ingest, 17 s alone. The lock is gone when the question's process ends, however it ends.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragkv.runtime import Check

from .output import print_note

FILE = "question.lock"  # `FILE` is in a home.
POLL_S = 0.1  # A command that gives way looks again after `POLL_S`.
WAIT_S = 120.0  # A command gives way for at most `WAIT_S`, then no more: the other process may be stopped.


@contextmanager
def going_first(home: Path) -> Iterator[None]:
    """Have the commands that give way pause meanwhile; without effect in a home that cannot be written."""
    try:
        file = (home / FILE).open("ab")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


class GivingWay:
    """A check that returns when no question is answered from `home`; raises what `check` raises."""

    def __init__(self, home: Path, check: Check) -> None:
        self._path, self._check, self._waits = home / FILE, check, True

    def __call__(self) -> None:
        """Wait while a question goes first."""
        self._check()
        ends, told = time.monotonic() + WAIT_S, False
        while self._waits and self._is_held():
            if not told:
                print_note("a question is asked: this goes on after its answer.")
            told = True
            time.sleep(POLL_S)
            self._check()
            self._waits = time.monotonic() < ends

    def _is_held(self) -> bool:
        try:
            with self._path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no question was asked yet
            pass
        return False
