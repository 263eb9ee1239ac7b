"""Prefills that wait for the model are computed in one pass (CacheBlend figure 15c), by the thread
of one of them.

The first to get the compute lock takes along its owner's others that wait, oldest first, of any
engine on the model. No owner waits for rows of another one in its own pass. It knows no plans: how
jobs are computed is up to its caller.
"""

import threading
from collections.abc import Callable
from typing import Any

from ragkv.runtime import Check, FairLock, Wait

# `JOINT_ROWS` is the most rows of a pass over several prompts, all of which wait for its end
# (measured: docs/log.md).
JOINT_ROWS = 512


class _WaitingJob:
    """A prefill that waits: `job` computes `rows` rows in a layer."""

    def __init__(self, job: Any, rows: float) -> None:
        self.job = job
        self.rows = rows
        self.wait = Wait()
        self.taken = False  # into a pass, of this thread or another one
        self.done = threading.Event()  # that pass is over


class JointPrefills:
    """The prefills that wait for one model."""

    def __init__(self, lock: FairLock) -> None:
        self._lock = lock
        self._guard = threading.Lock()
        self._waiting: list[_WaitingJob] = []

    def run(
        self, job: Any, rows: float, check: Check, compute: Callable[[list[Any]], None]
    ) -> None:
        """Return when a pass with `job` is over. Raises what `check` raises, and what `compute`
        raises on this thread.

        `compute` is called under the lock: with `job`, and with others unless they have more than
        `JOINT_ROWS` rows together. It tells each how it ended; one that it did not tell did not
        end.
        """
        place = _WaitingJob(job, rows)
        with self._guard:
            self._waiting.append(place)
        try:
            if self._lock.acquire(place.wait, check):
                places = self._joining(place)
                try:
                    compute([one.job for one in places])
                finally:
                    for one in places:
                        one.done.set()
                    self._lock.release()
        finally:
            with self._guard:
                self._waiting = [other for other in self._waiting if other is not place]
            if place.taken:  # another thread may still compute it, also when this one gave up
                place.done.wait()

    def _joining(self, first: _WaitingJob) -> list[_WaitingJob]:
        """`first`, and its owner's others that fit into its pass; they do not wait for the lock any
        more.
        """
        with self._guard:
            places = [first]
            rows = first.rows
            for place in self._waiting:
                is_own = place is not first and place.wait.owner == first.wait.owner
                if is_own and rows + place.rows <= JOINT_ROWS:
                    places.append(place)
                    rows += place.rows
            self._waiting = [place for place in self._waiting if place not in places]
            for place in places:
                place.taken = True
        self._lock.dismiss(place.wait for place in places[1:])
        return places
