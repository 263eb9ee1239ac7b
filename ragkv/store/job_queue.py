"""A background thread with a bounded queue, so that no request waits for a disk or a server.

Jobs run in the order of submission. The queue is bounded by bytes. A job that does not fit is
refused, at once or after a wait of a given length.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ragkv.errors import EntryDamagedError
from ragkv.runtime import openmp
from ragkv.runtime.waiting import POLL_S

from .entry import EntryKey

log = logging.getLogger(__name__)

E = TypeVar("E")


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[E]):
    """One piece of work."""

    run: Callable[[], object]
    key: EntryKey | None = None  # of the entry it works on
    size_bytes: int = 0  # memory it holds until it is done
    entry: E | None = None  # the entry to be written; `None` for other work
    cancel: Callable[[], object] = lambda: None  # called instead of `run` if the job is dropped


@dataclass(eq=False)
class JobQueue(Generic[E]):
    """A bounded queue and its thread, which starts with the first job."""

    capacity_bytes: int
    name: str  # of the thread
    _jobs: deque[Job[E]] = field(default_factory=deque, init=False)
    _running: Job[E] | None = field(default=None, init=False)
    # For each job that waits or runs, how many flushes had begun when it came. A job that another
    # one submits, on this thread, has the number of that one.
    _rounds: dict[Job[E], int] = field(default_factory=dict, init=False)
    _flushes: int = field(default=0, init=False)
    # by key, the last job that writes it
    _entries: dict[EntryKey, Job[E]] = field(default_factory=dict, init=False)
    _pending_bytes: int = field(default=0, init=False)  # of waiting jobs and the running one
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    is_closed: bool = field(default=False, init=False)  # it takes no more jobs
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def pending_bytes(self) -> int:
        """Bytes held by jobs that are not done."""
        with self._changed:
            return self._pending_bytes

    @property
    def is_current(self) -> bool:
        """Whether its thread asks: what is submitted now is done after what it does now."""
        return threading.current_thread() is self._thread

    def submit(
        self, job: Job[E], wait_s: float = 0.0, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Queue `job`; `False`, without calling anything, if its bytes do not fit, the thread is
        closing or it cannot begin.

        `wait_s` is how long this waits for room, unless it `is_over` before. A caller that waits
        can also submit a job that is larger than the whole queue: the job is taken when the queue
        is empty.
        """

        def fits() -> bool:
            if not job.size_bytes:  # even while a job runs that is larger than the queue
                return True
            waits_alone = wait_s > 0.0 and not self._pending_bytes
            return waits_alone or self._pending_bytes + job.size_bytes <= self.capacity_bytes

        with self._changed:
            until = time.monotonic() + wait_s
            while not (self.is_closed or fits()):
                left_s = until - time.monotonic()
                if left_s <= 0.0 or is_over():
                    return False
                self._changed.wait(min(left_s, POLL_S))
            if self.is_closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # The system has no thread to give.
                    log.warning("%s cannot begin: %s", self.name, error)
                    return False
                self._thread = thread
            self._pending_bytes += job.size_bytes
            parent = self._running if self.is_current else None
            self._rounds[job] = self._flushes if parent is None else self._rounds[parent]
            self._jobs.append(job)
            if job.key is not None and job.entry is not None:
                self._entries[job.key] = job
            self._changed.notify_all()
        return True

    def entry(self, key: EntryKey) -> E | None:
        """The entry of `key` that a waiting or running job writes, or `None`."""
        with self._changed:
            job = self._entries.get(key)
            return None if job is None else job.entry

    def cancel(self, key: EntryKey) -> bool:
        """Cancel the waiting jobs of `key` and wait until a running one is done; whether there was
        any.

        Does nothing when called by the background thread itself: jobs for `key` that wait then were
        submitted later.
        """
        if self.is_current:
            return False
        with self._changed:
            dropped = [job for job in self._jobs if job.key == key]
            if dropped:
                self._jobs = deque(job for job in self._jobs if job.key != key)
            for job in dropped:
                self._forget(job)
            self._changed.notify_all()
            ran = self._runs(key)
            self._changed.wait_for(lambda: not self._runs(key))
        for job in dropped:
            job.cancel()
        return bool(dropped) or ran

    def flush(self) -> None:
        """Return when all that was submitted before is done, with the jobs that it submits. Later
        ones are not waited for: under steady load the queue may never be empty.
        """
        with self._changed:
            now = self._flushes
            self._flushes += 1
            self._changed.wait_for(lambda: all(one > now for one in self._rounds.values()))

    def close(self) -> None:
        """Finish the waiting jobs and stop."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _runs(self, key: EntryKey) -> bool:
        return self._running is not None and self._running.key == key

    def _forget(self, job: Job[E]) -> None:
        """The job is done, or was dropped. The caller holds `_changed`."""
        self._pending_bytes -= job.size_bytes
        self._rounds.pop(job, None)
        if job.key is not None and self._entries.get(job.key) is job:
            del self._entries[job.key]

    def _work(self) -> None:
        openmp.use_one_thread()
        while (job := self._next()) is not None:
            try:
                job.run()
            # Redis went away while the entry was read, for example
            except EntryDamagedError as error:
                log.warning("%s: an entry was not copied. %s", self.name, error)
            except Exception:  # a store failure never fails a request, and the next job must run
                log.exception(
                    "%s: work for entry %s failed; going on without it.",
                    self.name,
                    job.key or "(none)",
                )
            with self._changed:
                self._running = None
                self._forget(job)
                self._changed.notify_all()
            del job  # otherwise it would hold its KV until the next job comes

    def _next(self) -> Job[E] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self.is_closed)
            if not self._jobs:
                return None
            self._running = self._jobs.popleft()
            return self._running
