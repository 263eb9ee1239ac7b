"""How work that is no request gets its turn at the model, and what a scheduler says of itself.

Background work, such as encoding chunks or measuring a profile, computes while no request runs. A
request meets none of this (`scheduler.py`).
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.runtime import Check, no_check

if TYPE_CHECKING:
    from .scheduler import SharedCompute, Work


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The queue now, and counts of requests since the engine was built."""

    waiting: int  # now
    admitted: int  # now: planning or prefilling
    served: int  # whose prefill ended
    refused: int  # the queue was full
    expired: int  # their deadline passed while they waited, prefilled or decoded
    cancelled: int  # cancelled while they waited, prefilled or decoded


class BackgroundTurns(ABC):
    """The part of a `Scheduler` that no request needs. All methods are thread-safe."""

    owner: str
    _compute: "SharedCompute"
    _lock: threading.Lock
    _waiting: "deque[Work]"
    _running: "set[Work]"
    _served: int
    _refused: int
    _expired: int
    _cancelled: int
    _closed: bool

    @abstractmethod
    def computing(self, check: Check = no_check) -> AbstractContextManager[None]:
        """See `Scheduler.computing`."""

    @abstractmethod
    def _add_requests(self, count: int) -> None:
        """So many more requests run on the model."""

    @contextmanager
    def encoding(self, check: Check = no_check) -> Iterator[None]:
        """Encode one batch of chunks inside the block. Raises what `computing` raises."""
        with self._compute.encoding.hold(self.owner, check=check), self.computing(check):
            yield

    @property
    def busy(self) -> bool:
        """Whether a request runs on the model, of this engine or of another one."""
        return self._compute.requests > 0

    def wait_idle(self, timeout_s: float, hurried: Callable[[], bool]) -> None:
        """Return when no request runs, when `hurried` is true after a `wake`, or after
        `timeout_s`.
        """
        with self._compute.changed:
            self._compute.changed.wait_for(lambda: not self.busy or hurried(), timeout_s)

    def wake(self) -> None:
        """Wake the threads in `wait_idle`, so that they ask `hurried` again."""
        self._add_requests(0)

    def stats(self) -> QueueStats:
        """The queue now, and counts."""
        with self._lock:
            counts = self._served, self._refused, self._expired, self._cancelled
            return QueueStats(len(self._waiting), len(self._running), *counts)

    def close(self) -> None:
        """Wait for the pass under way to end, and allow no other. Answers that decode already go
        on.
        """
        with self._compute.lock.hold(self.owner):
            self._closed = True
