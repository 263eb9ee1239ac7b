"""Every question to a remote goes through here: counted, timed, and not asked at all while the breaker is open."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ragkv.errors import RemoteError

from ..tiers.base import RemoteStats, Speed
from .breaker import Breaker

log = logging.getLogger(__name__)

T = TypeVar("T")


class Guard:
    """Thread-safe."""

    def __init__(self, name: str, timeout_s: float, breaker: Breaker, opened: Callable[[], None]) -> None:
        """`opened` is called when the breaker opens. `timeout_s` is what an answer may take."""
        self.breaker = breaker
        self._name, self._slow_s, self._opened = name, timeout_s / 2, opened
        self._failures = self._timeouts = self._slow = self._skipped = 0
        self._lost_s = 0.0
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, action: Callable[[], T], brief: bool = True) -> T:
        """What `action` returns; a `brief` one is slow if it takes half the timeout. Raises `RemoteError`."""
        if not self.breaker.admits() or self._closed:
            with self._lock:
                self._skipped += 1
            raise RemoteError(f"{self._name} is not asked until it answers again")
        began = time.monotonic()
        try:
            answer = action()
        except RemoteError as error:
            self.failed(error, time.monotonic() - began)
            raise
        if brief and time.monotonic() - began > self._slow_s:
            with self._lock:
                self._slow += 1
            self._judge(self.breaker.failed(), "its answers are slow")
        else:
            self.breaker.succeeded()
        return answer

    def failed(self, error: RemoteError, seconds: float) -> None:
        """A call ended in `error` after so long."""
        with self._lock:
            self._failures += 1
            self._timeouts += error.timed_out
            self._lost_s += seconds
        self._judge(self.breaker.failed(error.timed_out), str(error))

    def stats(self, speed: Speed | None, pending_deletions: int) -> RemoteStats:
        """What was counted, with what the tier knows besides."""
        with self._lock:
            return RemoteStats(
                state=self.breaker.state.value,
                opened=self.breaker.opened,
                failures=self._failures,
                timeouts=self._timeouts,
                slow=self._slow,
                skipped=self._skipped,
                lost_s=self._lost_s,
                pending_deletions=pending_deletions,
                latency_s=None if speed is None else speed.latency_s,
                bytes_per_s=None if speed is None else speed.bytes_per_s,
            )

    def close(self) -> None:
        """Ask nothing any more."""
        self._closed = True
        self._opened()

    def _judge(self, opened: bool, why: str) -> None:
        if opened:
            log.warning("%s: everything in it is a miss until it answers again (%s).", self._name, why)
            self._opened()
