"""A thread pool that runs its jobs by priority, not by age."""

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from . import openmp

T = TypeVar("T")


class PriorityThreadPool:
    """Threads that run the job with the lowest priority number first. Thread-safe."""

    def __init__(self, count: int, name: str) -> None:
        """At most `count` threads, whose names begin with `name`."""
        self._pool = ThreadPoolExecutor(count, name, initializer=openmp.use_one_thread)
        self._serial = itertools.count()  # jobs of one priority run in the order they came
        self._jobs: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._lock = threading.Lock()  # guards the jobs

    def submit(self, priority: int, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. Once the pool is closed its future is cancelled at once."""
        future: Future[T] = Future()
        with self._lock:
            heapq.heappush(self._jobs, (priority, next(self._serial), future, work))
        try:
            self._pool.submit(self._run_next)
        except RuntimeError:  # it is closed
            self._cancel_queued()
        return future

    def close(self) -> None:
        """Cancel the queued jobs and wait for the running ones. Twice is harmless."""
        self._cancel_queued()
        self._pool.shutdown()

    def _cancel_queued(self) -> None:
        with self._lock:
            queued, self._jobs = self._jobs, []
        for _, _, future, _ in queued:
            future.cancel()

    def _run_next(self) -> None:
        """Run the first job that is queued now; one that was submitted meanwhile may be before the one that came."""
        with self._lock:
            if not self._jobs:
                return
            _, _, future, work = heapq.heappop(self._jobs)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # the future hands it to its waiter
            future.set_exception(error)
