"""The health of a remote. Its calls are counted here, and refused while its circuit breaker is
open.

The breaker opens after some failures in a row, and at once after a timeout, because the next call
would take as long. While the breaker is open no request calls the remote. So a fault costs one
timeout, not one per request. From the first failure on, probes are sent in the background, after
pauses that double, until one is answered. Then requests call again. No request waits for a probe,
and reports do not depend on the next request.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ragkv.errors import RemoteError
from ragkv.store.tiers.stats import RemoteStats

log = logging.getLogger(__name__)

FAILURES_TO_OPEN = 3  # So many failures in a row open the breaker.
FIRST_PAUSE_S = 1.0  # The first probe comes after this pause.
LONGEST_PAUSE_S = 60.0
SAMPLE_WEIGHT = 0.3  # The latest sample has this weight in the running mean of the bandwidth.
# A bandwidth sample ends after so many bytes, or when no read is under way.
SAMPLE_BYTES = 4 * 1024**2
FORGET_SPEED_S = 60.0

T = TypeVar("T")
Clock = Callable[[], float]


class SpeedMeter:
    """A running mean of the bandwidth of this process's own reads.

    Bandwidth is bytes over the time in which at least one read was under way, whatever the number
    of connections. A measurement expires: a remote that is not read because it was slow would
    otherwise never be found fast again.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._s_per_byte: float | None = None
        self._measured_at = 0.0
        # of the current sample
        self._reads = 0
        self._since = 0.0
        self._bytes = 0
        self._lock = threading.Lock()

    def begin_read(self) -> None:
        """A read begins; `end_read` must follow."""
        with self._lock:
            if not self._reads:
                self._since = self._clock()
                self._bytes = 0
            self._reads += 1

    def end_read(self, size_bytes: int) -> None:
        """A read returned `size_bytes`; 0 if it failed."""
        with self._lock:
            self._reads -= 1
            self._bytes += size_bytes
            now = self._clock()
            if self._bytes and (not self._reads or self._bytes >= SAMPLE_BYTES):
                sample = (now - self._since) / self._bytes
                before = sample if self._s_per_byte is None else self._s_per_byte
                self._s_per_byte = (1 - SAMPLE_WEIGHT) * before + SAMPLE_WEIGHT * sample
                self._since = now
                self._bytes = 0
                self._measured_at = now

    def speed(self) -> float | None:
        """The mean in bytes a second; `None` if nothing was read lately."""
        with self._lock:
            if self._s_per_byte is None or self._clock() - self._measured_at > FORGET_SPEED_S:
                return None
            return 1.0 / max(self._s_per_byte, 1e-15)


class Health:
    """The circuit breaker of one remote, and the counts of its calls."""

    def __init__(
        self,
        name: str,
        on_failure: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        """`name` is for messages; `on_failure` is told that a probe will be due."""
        self.meter = SpeedMeter(clock)
        self._name = name
        self._on_failure = on_failure
        self._clock = clock
        self._longest_pause_s = longest_pause_s
        self._open = False
        self._failures_in_a_row = 0
        self._pause_s = FIRST_PAUSE_S
        self._probe_at = 0.0
        self._failures = self._skipped = 0
        self._away_s = 0.0
        self._away_since: float | None = None  # the first of the failures in a row
        self._lock = threading.Lock()

    @property
    def available(self) -> bool:
        """Whether a request may call."""
        return not self._open

    @property
    def answers(self) -> bool:
        """Whether the last call was answered in time."""
        return self._away_since is None

    def call(self, action: Callable[[], T]) -> T:
        """The result of `action`. Raises `RemoteError`."""
        if self._open:
            with self._lock:
                self._skipped += 1
            raise RemoteError(f"{self._name} is not called until it answers again")
        try:
            answer = action()
        except RemoteError as error:
            self.failed(error)
            raise
        with self._lock:
            if not self._open:  # a late answer to an earlier call does not close the breaker
                self._answered()
        return answer

    def failed(self, error: RemoteError) -> None:
        """A call ended in `error`."""
        with self._lock:
            self._failures += 1
            self._failures_in_a_row += 1
            now = self._clock()
            self._away_since = now if self._away_since is None else self._away_since
            opens = not self._open and (
                error.timed_out or self._failures_in_a_row >= FAILURES_TO_OPEN
            )
            self._open |= opens
            self._probe_at = now + self._pause_s
        if opens:
            log.warning("%s is not called until it answers again (%s).", self._name, error)
        self._on_failure()

    def probe_due_s(self) -> float | None:
        """Seconds until a probe is due; `None` if none is, because the last call was answered."""
        with self._lock:
            return None if self._away_since is None else max(0.0, self._probe_at - self._clock())

    def probe(self, ping: Callable[[], object]) -> None:
        """Call `ping` if a probe is due. An answer closes the breaker; any exception is a
        failure.
        """
        if self.probe_due_s() != 0.0:
            return
        try:
            ping()
        except Exception as error:
            self._pause_s = min(self._longest_pause_s, 2 * self._pause_s)
            self.failed(error if isinstance(error, RemoteError) else RemoteError(str(error)))
            return
        with self._lock:
            was_open = self._open
            self._open = False
            self._pause_s = FIRST_PAUSE_S
            self._answered()
        if was_open:
            log.info("%s answers again.", self._name)

    def stats(self, pending_deletions: int = 0) -> RemoteStats:
        """The counts, with the tier's number of unconfirmed deletions."""
        with self._lock:
            away_s = 0.0 if self._away_since is None else self._clock() - self._away_since
            answers = self._away_since is None
            away_s = self._away_s + away_s
            return RemoteStats(answers, away_s, self._failures, self._skipped, pending_deletions)

    def _answered(self) -> None:
        """The remote answered. The caller holds `_lock`."""
        self._failures_in_a_row = 0
        if self._away_since is not None:
            self._away_s += self._clock() - self._away_since
            self._away_since = None
