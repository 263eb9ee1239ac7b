"""How fast a remote is, from our own reads: running means, so that the controller goes by today's network.

Bandwidth is counted over the time in which anything was being read, whatever the number of connections. What was
measured long ago is forgotten: a remote that nobody reads because it was slow would never be found quick again.
"""

import threading
import time
from collections.abc import Callable

from ..tiers.base import Speed

WEIGHT = 0.3  # of the latest sample
SAMPLE_BYTES = 4 * 1024**2  # a sample ends with so many, or when nothing is read any more
FORGET_S = 60.0


class Meter:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latency_s: float | None = None
        self._byte_s: float | None = None
        self._measured_at = 0.0
        self._reading, self._since, self._bytes = 0, 0.0, 0
        self._lock = threading.Lock()

    def looked_up(self, seconds: float) -> None:
        """A lookup took so long."""
        with self._lock:
            self._latency_s = _mean(self._latency_s, seconds)

    def begin(self) -> None:
        """A read begins; `end` must follow."""
        with self._lock:
            if not self._reading:
                self._since, self._bytes = self._clock(), 0
            self._reading += 1

    def end(self, size_bytes: int) -> None:
        """It brought so many bytes, 0 if it failed."""
        with self._lock:
            self._reading -= 1
            self._bytes += size_bytes
            now = self._clock()
            if self._bytes and (not self._reading or self._bytes >= SAMPLE_BYTES):
                self._byte_s = _mean(self._byte_s, (now - self._since) / self._bytes)
                self._since, self._bytes, self._measured_at = now, 0, now

    def speed(self) -> Speed | None:
        """What was measured lately, or `None`."""
        with self._lock:
            if self._byte_s is None or self._clock() - self._measured_at > FORGET_S:
                return None
            return Speed(self._latency_s or 0.0, 1.0 / max(self._byte_s, 1e-15))


def _mean(before: float | None, latest: float) -> float:
    return latest if before is None else (1 - WEIGHT) * before + WEIGHT * latest
