"""How a remote is doing: its calls are timed and counted here, and refused while its circuit breaker is open.

The breaker opens after some failures or slow answers in a row, and at once after a timeout, because the next call would
cost as much. While it is open no request calls the remote: a fault costs one timeout, not one per request. After a
pause, which doubles each time, one probe is sent in the background (half-open). Requests call again once a probe was
answered, and never pay for a probe. After a first failure, too, a probe finds out whether the remote is away, so that
the reports do not depend on the next request.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from ragkv.errors import RemoteError

from ..tiers.base import RemoteStats

log = logging.getLogger(__name__)

FAILURES_TO_OPEN = 3  # So many failures in a row open the breaker.
FIRST_PAUSE_S = 1.0  # The first probe comes after this pause.
LONGEST_PAUSE_S = 60.0
FAILED_PAUSE_S = 5.0  # A failure that did not open the breaker is followed by a probe after this pause.
SAMPLE_WEIGHT = 0.3  # The latest sample has this weight in a running mean.
SAMPLE_BYTES = 4 * 1024**2  # A bandwidth sample ends after so many bytes, or when no read is under way.
FORGET_SPEED_S = 60.0

T = TypeVar("T")
Clock = Callable[[], float]


class BreakerState(Enum):
    """Whether requests may call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"  # a probe is under way


class SpeedMeter:
    """A running mean of the bandwidth of this process's own reads. Thread-safe.

    Bandwidth is bytes over the time in which at least one read was under way, whatever the number of connections. A
    measurement expires: a remote that is not read because it was slow would otherwise never be found fast again.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._s_per_byte: float | None = None
        self._measured_at = 0.0
        self._reads, self._since, self._bytes = 0, 0.0, 0  # of the current sample
        self._lock = threading.Lock()

    def begin_read(self) -> None:
        """A read begins; `end_read` must follow."""
        with self._lock:
            if not self._reads:
                self._since, self._bytes = self._clock(), 0
            self._reads += 1

    def end_read(self, size_bytes: int) -> None:
        """A read returned `size_bytes`; 0 if it failed."""
        with self._lock:
            self._reads -= 1
            self._bytes += size_bytes
            now = self._clock()
            if self._bytes and (not self._reads or self._bytes >= SAMPLE_BYTES):
                self._s_per_byte = _mean(self._s_per_byte, (now - self._since) / self._bytes)
                self._since, self._bytes, self._measured_at = now, 0, now

    def speed(self) -> float | None:
        """The mean in bytes a second; `None` if nothing was read lately."""
        with self._lock:
            if self._s_per_byte is None or self._clock() - self._measured_at > FORGET_SPEED_S:
                return None
            return 1.0 / max(self._s_per_byte, 1e-15)


class Health:
    """The circuit breaker of one remote, and the counts of its calls. Thread-safe."""

    def __init__(
        self,
        name: str,
        timeout_s: float,
        on_probe: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        """`name` is for messages; an answer that takes half of `timeout_s` is slow; `on_probe` announces a probe."""
        self.meter = SpeedMeter(clock)
        self._name, self._slow_s, self._on_probe, self._clock = name, timeout_s / 2, on_probe, clock
        self._longest_pause_s = longest_pause_s
        self._state, self._failures_in_a_row = BreakerState.CLOSED, 0
        self._pause_s, self._probe_at = FIRST_PAUSE_S, 0.0
        self._failures = self._timeouts = self._skipped = 0
        self._lost_s = self._away_s = 0.0
        self._away_since: float | None = None  # the first of the failures in a row
        self._stopped = False
        self._lock = threading.Lock()

    @property
    def available(self) -> bool:
        """Whether a request may call."""
        return self._state is BreakerState.CLOSED and not self._stopped

    @property
    def answers(self) -> bool:
        """Whether the last call was answered in time."""
        return self._away_since is None

    def call(self, action: Callable[[], T], brief: bool = True) -> T:
        """The result of `action`. Only a `brief` action can be slow. Raises `RemoteError`."""
        if not self.available:
            with self._lock:
                self._skipped += 1
            raise RemoteError(f"{self._name} is not called until it answers again")
        began = self._clock()
        try:
            answer = action()
        except RemoteError as error:
            self.record_failure(error, self._clock() - began)
            raise
        if brief and self._clock() - began > self._slow_s:
            self._count_towards_opening("its answers are slow")
        else:
            with self._lock:
                if self._state is BreakerState.CLOSED:  # a late answer to an earlier call does not close the breaker
                    self._answered()
        return answer

    def record_failure(self, error: RemoteError, seconds: float) -> None:
        """A call ended in `error` after `seconds`."""
        with self._lock:
            self._failures += 1
            self._timeouts += error.timed_out
            self._lost_s += seconds
        self._count_towards_opening(str(error), error.timed_out)

    def probe_due_s(self) -> float | None:
        """Seconds until a probe is due; `None` if none is: the last call was answered, or a probe is under way."""
        with self._lock:
            needed = self._away_since is not None and self._state is not BreakerState.HALF_OPEN
            return max(0.0, self._probe_at - self._clock()) if needed else None

    def probe(self, ping: Callable[[], object]) -> bool:
        """Call `ping` if a probe is due. Returns whether that closed the breaker; any exception is a failure."""
        with self._lock:
            if self._away_since is None or self._clock() < self._probe_at:
                return False
            before, self._probe_at = self._state, self._clock() + FAILED_PAUSE_S
            if before is BreakerState.OPEN:
                self._state = BreakerState.HALF_OPEN
        if before is BreakerState.CLOSED:
            with contextlib.suppress(RemoteError):
                self.call(ping)
            return False
        try:
            ping()
        except Exception as error:
            log.debug("%s does not answer yet: %s", self._name, error)
            with self._lock:
                self._pause_s = min(self._longest_pause_s, 2 * self._pause_s)
                self._state, self._probe_at = BreakerState.OPEN, self._clock() + self._pause_s
            return False
        with self._lock:
            self._state, self._pause_s = BreakerState.CLOSED, FIRST_PAUSE_S
            self._answered()
        log.info("%s answers again.", self._name)
        return True

    def stats(self, pending_deletions: int) -> RemoteStats:
        """The counts, with the tier's number of unconfirmed deletions."""
        with self._lock:
            away_s = 0.0 if self._away_since is None else self._clock() - self._away_since
            return RemoteStats(
                state=self._state.value,
                answers=self._away_since is None,
                away_s=self._away_s + away_s,
                failures=self._failures,
                timeouts=self._timeouts,
                skipped=self._skipped,
                lost_s=self._lost_s,
                pending_deletions=pending_deletions,
            )

    def stop(self) -> None:
        """Refuse all calls from now on."""
        self._stopped = True

    def _count_towards_opening(self, why: str, timed_out: bool = False) -> None:
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return
            self._failures_in_a_row += 1
            now = self._clock()
            self._away_since = now if self._away_since is None else self._away_since
            opens = timed_out or self._failures_in_a_row >= FAILURES_TO_OPEN
            self._probe_at = now + (self._pause_s if opens else FAILED_PAUSE_S)
            if opens:
                self._state = BreakerState.OPEN
        if opens:
            log.warning("%s is not called until it answers again (%s).", self._name, why)
        self._on_probe()

    def _answered(self) -> None:
        """The remote answered. Needs `_lock`."""
        self._failures_in_a_row = 0
        if self._away_since is not None:
            self._away_s += self._clock() - self._away_since
            self._away_since = None


def _mean(before: float | None, latest: float) -> float:
    return latest if before is None else (1 - SAMPLE_WEIGHT) * before + SAMPLE_WEIGHT * latest
