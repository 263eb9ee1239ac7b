"""Pauses between the batches of tasks, so that answers get most of the machine while they run.

Splitting, embedding, encoding and indexing compute in batches. Before each batch a task checks whether it should go on,
and if answers are running it waits, for at most `PAUSE_SHARE` times what the last batch computed for each running task.
So all tasks together take about a fifth of a core from answers, and each still comes to an end. The event loop's work
for a task counts as the task's: a flood of small ones would keep it, and Python's lock, from the answers of others.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ragkv.runtime import Check, never_urgent, openmp, release_memory
from ragkv.scheduling import Scheduler

from .work_context import WorkContext

PAUSE_SHARE = 4.0
BATCH_S = 0.01  # less computing than this is not worth a pause
REQUEST_S = 0.005  # about what the event loop computes for a task: it reads, answers and logs the request
LONG_S = 0.2  # a task that computed this long gives back the memory it freed


class TaskPauses:
    """The pauses of all tasks of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._owed_s: dict[str, float] = {}  # by tenant: computing of ended tasks, to be paused for by the next one

    @contextmanager
    def task(self, context: WorkContext, scheduler: Scheduler, tenant: str) -> Iterator[Check]:
        """What a task of the `tenant` calls before each batch. It raises what `context.check` raises.

        `scheduler` tells whether answers run. The call computes on this thread.
        """
        began = time.thread_time()
        with self._lock:
            self._running += 1
            resumed = time.thread_time() - self._owed_s.pop(tenant, 0.0)

        def check() -> None:
            nonlocal resumed
            context.check()
            if (computed_s := time.thread_time() - resumed) < BATCH_S:
                return
            openmp.release_threads()
            scheduler.wait_idle(PAUSE_SHARE * computed_s * self._running, context.cancelled.is_set)
            resumed = time.thread_time()
            context.check()

        try:
            with never_urgent():
                check()
                yield check
        finally:
            with self._lock:
                self._running -= 1
                self._owed_s[tenant] = self._owed_s.get(tenant, 0.0) + time.thread_time() - resumed + REQUEST_S
            if time.thread_time() - began > LONG_S:
                release_memory()
