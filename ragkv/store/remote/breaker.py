"""A circuit breaker: while a remote fails or is slow nobody asks it; its faults cost a timeout, not one a request.

Closed, it lets everybody through. It opens after some failures or slow answers in a row, and at once when an answer
timed out: the next would cost as much. After a pause, which doubles each time, one probe is made in the background
(half-open); requests go through again once a probe was answered, and never pay for one.
"""

import threading
import time
from collections.abc import Callable
from enum import Enum

FAILURES = 3  # in a row, until it opens
PAUSE_S = 1.0  # before the first probe
LONGEST_PAUSE_S = 60.0


class State(Enum):
    """Whether requests may ask."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"  # a probe is under way


class Breaker:
    """Thread-safe."""

    def __init__(self, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._shortest_s, self._pause_s, self._clock = pause_s, pause_s, clock
        self._state, self._in_a_row, self._probe_at = State.CLOSED, 0, 0.0
        self._lock = threading.Lock()
        self.opened = 0  # times

    @property
    def state(self) -> State:
        """As it is now."""
        return self._state

    def admits(self) -> bool:
        """Whether a request may ask."""
        return self._state is State.CLOSED

    def succeeded(self) -> None:
        """An answer came in good time. Late ones, to what was asked before it opened, change nothing."""
        with self._lock:
            if self._state is State.CLOSED:
                self._in_a_row = 0

    def failed(self, timed_out: bool = False) -> bool:
        """An answer was an error, or slow, or `timed_out`; whether it opened by that."""
        with self._lock:
            self._in_a_row += 1
            if self._state is not State.CLOSED or (self._in_a_row < FAILURES and not timed_out):
                return False
            self._open()
            return True

    def due_s(self) -> float | None:
        """Seconds until a probe is due, `None` if none is wanted."""
        with self._lock:
            return max(0.0, self._probe_at - self._clock()) if self._state is State.OPEN else None

    def probe(self, ask: Callable[[], object]) -> bool:
        """Call `ask`, if a probe is due; whether it closed by that. What `ask` raises counts as a failure."""
        with self._lock:
            if self._state is not State.OPEN or self._clock() < self._probe_at:
                return False
            self._state = State.HALF_OPEN
        try:
            ask()
        except Exception:  # whatever it was: it is not well
            with self._lock:
                self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
                self._state, self._probe_at = State.OPEN, self._clock() + self._pause_s
            return False
        with self._lock:
            self._state, self._in_a_row, self._pause_s = State.CLOSED, 0, self._shortest_s
        return True

    def _open(self) -> None:
        self._state, self._probe_at = State.OPEN, self._clock() + self._pause_s
        self.opened += 1
