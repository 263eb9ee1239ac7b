"""A thread pool that runs its jobs by priority, not by age."""

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from . import openmp

T = TypeVar("T")


class PriorityThreadPool:
    """Daemon threads that run the job with the lowest priority number first. Thread-safe."""

    def __init__(self, count: int, name: str) -> None:
        """At most `count` threads, each named `name`; a thread starts when a job comes and none is idle."""
        self._count, self._name = count, name
        self._serial = itertools.count()  # jobs of one priority run in the order they came
        self._jobs: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closing = False
        self._changed = threading.Condition()

    def submit(self, priority: int, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. Once the pool is closed its future is cancelled at once."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                future.cancel()
                future.set_running_or_notify_cancel()
                return future
            heapq.heappush(self._jobs, (priority, next(self._serial), future, work))
            if not self._idle and len(self._threads) < self._count:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel the queued jobs and wait for the running ones. Twice is harmless."""
        with self._changed:
            self._closing = True
            queued, self._jobs = self._jobs, []
            self._changed.notify_all()
        for _, _, future, _ in queued:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        openmp.use_one_thread()
        while (job := self._next()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # the future hands it to its waiter
                future.set_exception(error)
            else:
                future.set_result(result)
            del job, future, work  # or the thread would hold the result until its next job

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs or self._closing)
            self._idle -= 1
            if not self._jobs:
                return None
            _, _, future, work = heapq.heappop(self._jobs)
            return future, work
