"""How many threads compute: as many as other programs leave processors for.

The threads of a product wait for the last of them. If another program has its processor, all wait,
and every product of a pass takes tens of times as long; one thread waits for no other. So what
others use is read again and again, while a pass runs, too.

Linux counts the time of each processor, and what this process did not use of it, others did.
Pressure (`/proc/pressure/cpu`) would not do: it says that somebody waited, not whether a thread
more would find a free processor. The number changes no bit of a result: rows and heads are divided
among threads, sums are not.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import openmp
from .processor import processors, quota

# The use of the processors is read after so many seconds, and is the mean of these.
PERIOD_S = 0.1
# An older reading says nothing of now: then programs that run at this moment are counted.
STALE_S = 2.0
# Of a processor that others use by less than half, a thread still gains.
SHARED = 0.45
STAT = Path("/proc/stat")


class Use(NamedTuple):
    """How the processors of this process are used."""

    at_s: float  # of a clock that only goes forward
    busy_s: float  # all programs', since the machine started
    own_s: float  # this process's, since it started
    running: int  # programs and threads that run or could run now, with the one that asks


def measured_use() -> Use | None:
    """The use now, in a tenth of a millisecond; `None` where the system does not say it.

    Programs of lower priority do not count: they hardly take time from this one.
    """
    own = {f"cpu{number}".encode() for number in processors()}
    # user, nice, system, idle, iowait, irq, softirq, steal
    counted = (0, 2, 5, 6, 7) if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else (0, 1, 2, 5, 6, 7)
    ticks = running = 0
    with suppress(OSError, ValueError, IndexError):
        for line in STAT.read_bytes().splitlines():
            name, _, rest = line.partition(b" ")
            if name in own:
                times = rest.split()
                ticks += sum(int(times[place]) for place in counted)
            elif name == b"procs_running":
                running = int(rest)
        return Use(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), running)
    return None


class ThreadChoice:
    """The number of threads on which one model computes; used by the thread whose turn it is."""

    def __init__(
        self, most: int, measure: Callable[[], Use | None] = measured_use, cores: int | None = None
    ) -> None:
        """At most `most` threads, and no more than the quota allows; `cores` of this process."""
        limit = quota()
        self._cores = len(processors()) if cores is None else cores
        self.most = most if limit is None else max(1, min(most, round(limit)))
        self.count = self.most
        self._measure = measure
        self._last: Use | None = None
        self._due_s = 0.0

    def begin(self) -> None:
        """Compute on the chosen number of threads from now on; called again and again in a turn."""
        if self.most == 1:
            return
        if time.monotonic() >= self._due_s:
            self._choose()
        openmp.use_threads(self.count)

    def end(self) -> None:
        """The calling thread's turn is over: it ends its pool, and gets its own number back."""
        if self.most > 1:
            openmp.use_threads(self.most)
        openmp.release_threads()

    def _choose(self) -> None:
        use = self._measure()
        self._due_s = time.monotonic() + PERIOD_S
        if use is None:
            return
        last = self._last
        self._last = use
        if last is None or use.at_s - last.at_s > STALE_S:
            others = float(use.running - 1)
        elif (elapsed_s := use.at_s - last.at_s) > 0:
            others = (use.busy_s - last.busy_s - (use.own_s - last.own_s)) / elapsed_s
        else:
            return
        self.count = min(self.most, max(1, int(self._cores - max(0.0, others) + SHARED)))
