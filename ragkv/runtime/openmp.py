"""Chooses the number of OpenMP threads for a model, and ends the pools that computing threads
started.

The threads of a product wait for the slowest of them. If another program has its processor, all
wait, and every product of a pass takes tens of times as long. A single thread waits for no other.
So the number of threads is the number of processors that other programs leave free. It is read
again and again, also while a pass runs. The number changes no bit of a result, because rows and
heads are divided among threads, and sums are not.

torch on Linux computes with GNU OpenMP. Every thread that computes gets its own pool of worker
threads, which lasts until that thread ends. Between two operations the workers spin for a moment,
so that the next operation finds them awake. But once all pools together have more workers than
there are processors, workers sleep at once, and every operation of every thread waits until they
wake up. On two cores, one idle pool of another thread slows a decode step of half a billion weights
from 52 ms to 66 ms. So only the thread that holds the compute lock keeps a pool, and helper threads
compute without one. A new pool takes about 60 us to start.
"""

import ctypes
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from . import processor

# The least time between two readings of how the processors are used. A reading is the mean since
# the one before. So the first choice after an idle time follows that idle time, and only the next
# one follows the present.
PERIOD_S = 0.1
# A thread still gains from a processor that other programs use for less than about half of the
# time.
SHARED = 0.45
_SOFT = 1  # OpenMP's omp_pause_soft


class ThreadChoice:
    """The number of threads on which one model computes; used by the thread whose turn it is."""

    def __init__(
        self,
        most: int,
        measure: Callable[[], processor.Use | None] = processor.measured_use,
        count: int | None = None,
    ) -> None:
        """At most `most` threads, and no more than the quota allows; `count` processors."""
        limit = processor.quota()
        self._processors = processor.cores() if count is None else count
        self.most = most if limit is None else max(1, min(most, round(limit)))
        self.count = self.most
        self._measure = measure
        self._last = measure() if self.most > 1 else None
        self._due_s = 0.0

    def begin(self) -> None:
        """Compute on the chosen number of threads from now on; called again and again in a turn."""
        if self.most == 1:
            return
        if time.monotonic() >= self._due_s:
            self._choose()
        use_threads(self.count)

    def end(self) -> None:
        """The calling thread's turn is over: it ends its pool, and gets its own number back."""
        if self.most > 1:
            use_threads(self.most)
        release_threads()

    def _choose(self) -> None:
        self._due_s = time.monotonic() + PERIOD_S
        last = self._last
        now = self._last = self._measure()
        if last is None or now is None or now.at_s <= last.at_s:
            return
        others_s = now.busy_s - last.busy_s - (now.own_s - last.own_s)
        free = self._processors - max(0.0, others_s / (now.at_s - last.at_s))
        self.count = min(self.most, max(1, int(free + SHARED)))


def release_threads() -> None:
    """End the calling thread's pool, if it has one; its next operation starts a new one. No-op
    without GNU OpenMP.
    """
    if (openmp := _gnu_openmp()) is not None:
        openmp.omp_pause_resource_all(_SOFT)


def use_one_thread() -> None:
    """Compute without a pool on the calling thread from now on: it runs while the model
    computes.
    """
    if (openmp := _gnu_openmp()) is not None:
        import torch  # here, so that importing ragkv.runtime stays light

        # torch sets a thread's number of workers at its first call, so this must come first
        torch.get_num_threads()
        openmp.omp_set_num_threads(1)


def use_threads(count: int) -> None:
    """Compute on `count` threads from now on, the calling one included."""
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """The OpenMP library of this torch, if it is GNU's: others have one pool for all threads."""
    import torch

    # its dependencies are searched for symbols, too
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    is_gnu = hasattr(found, "GOMP_parallel") and not hasattr(found, "__kmpc_fork_call")
    return found if is_gnu and hasattr(found, "omp_pause_resource_all") else None
