"""The admission queue: requests start in the order in which they come (CachedAttention section 3.3).

The callers' threads do the work. `workers` requests are admitted at a time: one computes, while the others look up and
read ahead, so that a request loads while its predecessor computes (section 3.2.1). A slot covers planning and prefill,
never decoding, so an open stream delays no other request. The queue knows no model and no prompts. The `PrefetchHint`
of a request says what it will read: the store sees it while the request waits. What is held for it is released however
it ends.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ragkv.config import SchedulerConfig
from ragkv.errors import CancelledError, DeadlineError, QueueFullError
from ragkv.store import PrefetchHint

POLL_S = 0.02  # cancellation poll interval: a thread cannot wait for two events at a time


class QueueListener(Protocol):
    """Sees the queue change: the store."""

    def queued(self, hint: PrefetchHint) -> None: ...

    def started(self, hint: PrefetchHint) -> None: ...

    def left(self, hint: PrefetchHint) -> None: ...


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The queue now, and counts of requests since the engine was built."""

    waiting: int  # now
    admitted: int  # now: planning or prefilling
    served: int  # prefilled
    refused: int  # the queue was full
    expired: int  # their deadline passed while they waited, prefilled or decoded
    cancelled: int  # cancelled while they waited, prefilled or decoded


class Ticket:
    """The deadline of one request, and the event that cancels it."""

    def __init__(
        self, deadline_s: float | None, cancel: threading.Event | None, ended: Callable[[Exception], None]
    ) -> None:
        """`ended` is called once, with the first error that `check` raises."""
        self._deadline_s, self._cancel, self._ended = deadline_s, cancel, ended
        self._began = time.monotonic()
        self._over = False

    def check(self) -> None:
        """Raise `CancelledError` or `DeadlineError` if the request should not go on."""
        error: CancelledError | DeadlineError
        if self._cancel is not None and self._cancel.is_set():
            error = CancelledError("The request was cancelled by its caller; what it held is released.")
        elif self._deadline_s is not None and time.monotonic() - self._began >= self._deadline_s:
            error = DeadlineError(
                f"The request's deadline of {self._deadline_s:g} s passed; what it held is released. Give it more "
                "time, ask for fewer tokens, or ask again when the queue is shorter."
            )
        else:
            return
        if not self._over:
            self._over = True
            self._ended(error)
        try:
            raise error
        finally:
            del error  # or it and this frame hold each other, and with them the request and its KV

    def wait(self, event: threading.Event) -> None:
        """Wait for `event`; raises what `check` raises."""
        while not event.wait(self._pause_s()):
            self.check()

    def acquire(self, lock: threading.Lock) -> None:
        """Wait for `lock` and acquire it; raises what `check` raises, without the lock."""
        while not lock.acquire(timeout=-1 if (pause_s := self._pause_s()) is None else pause_s):
            self.check()

    def _pause_s(self) -> float | None:
        """How long to wait until the next `check`; `None`: for ever."""
        if self._cancel is not None:
            return POLL_S
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic() + self._began)


class IdleTicket(Ticket):
    """A ticket of work that is done only while no request runs."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        """`busy` says whether to stop."""
        super().__init__(None, None, lambda _: None)
        self._busy = busy

    def check(self) -> None:
        """Raise `CancelledError` if a request runs."""
        if self._busy():
            raise CancelledError("A request came; this work goes on later, or not at all.")


class _Place:
    """A request that waits or is admitted."""

    def __init__(self, hint: PrefetchHint) -> None:
        self.hint = hint
        self.admitted = threading.Event()


class AdmissionQueue:
    """Admits requests first come first served. All methods are thread-safe."""

    def __init__(self, config: SchedulerConfig, listener: QueueListener) -> None:
        self._config, self._listener = config, listener
        self._lock = threading.Lock()
        self._waiting: deque[_Place] = deque()
        self._running: set[_Place] = set()
        self._served = self._refused = self._expired = self._cancelled = 0

    def ticket(self, deadline_s: float | None = None, cancel: threading.Event | None = None) -> Ticket:
        """A ticket for a new request. Without a deadline of its own it has the config's."""
        return Ticket(self._config.deadline_s if deadline_s is None else deadline_s, cancel, self._count)

    @contextmanager
    def admitted(self, hint: PrefetchHint, ticket: Ticket) -> Iterator[None]:
        """Wait for a slot and hold it. The store knows `hint` from when the request queues until the slot is free.

        Raises `QueueFullError` at once if too many requests wait, and what `ticket.check` raises.
        """
        ticket.check()
        place = self._join(hint)
        try:
            ticket.wait(place.admitted)
            ticket.check()
            self._listener.started(hint)
            yield
            with self._lock:
                self._served += 1
        finally:
            self._leave(place)

    def stats(self) -> QueueStats:
        """The queue now, and counts."""
        with self._lock:
            counts = self._served, self._refused, self._expired, self._cancelled
            return QueueStats(len(self._waiting), len(self._running), *counts)

    def _join(self, hint: PrefetchHint) -> _Place:
        limit, place = self._config.queue_limit, _Place(hint)
        with self._lock:
            if len(self._running) >= self._config.workers and len(self._waiting) >= limit:
                self._refused += 1
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait and the queue takes {limit}. Ask again later, or raise "
                    "scheduler.queue_limit."
                )
            self._listener.queued(hint)  # under the lock, so that the store sees the requests in this queue's order
            self._waiting.append(place)
            self._admit()
        return place

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.workers:
            place = self._waiting.popleft()
            self._running.add(place)
            place.admitted.set()

    def _leave(self, place: _Place) -> None:
        self._listener.left(place.hint)
        with self._lock:
            if place in self._running:
                self._running.remove(place)
            else:
                self._waiting.remove(place)
            self._admit()

    def _count(self, error: Exception) -> None:
        with self._lock:
            self._expired += isinstance(error, DeadlineError)
            self._cancelled += isinstance(error, CancelledError)


__all__ = ["AdmissionQueue", "QueueStats", "Ticket"]
