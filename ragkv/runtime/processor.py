"""The processors of this machine, how full they are, and on how many threads a model computes there.

The threads of a product wait for the last of them. If another program has its processor, all wait,
and every product of a pass takes tens of times as long; one thread waits for no other. So as many
compute as others leave processors for. What others use is read again and again, while a pass runs,
too: Linux counts the time of each processor, and what this process did not use of it, others did.
Pressure (`/proc/pressure/cpu`) would not do: it says that somebody waited, not whether a thread
more would find a free processor. The number changes no bit of a result: rows and heads are divided
among threads, sums are not.
"""

import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import openmp

# The instructions that matter here.
FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
CGROUP = Path("/sys/fs/cgroup")
STAT = Path("/proc/stat")
# The use of the processors is read after so many seconds at the earliest, and is the mean since the
# reading before: the first choice after an idle time is that of this time, the next one of now.
PERIOD_S = 0.1
# Of a processor that others use by less than about half, a thread still gains.
SHARED = 0.45
# The load for each processor that is too much: our own threads alone make it 1.
FULL = 1.5


def cpu_model() -> str:
    """The processor's name as the system reports it."""
    return " ".join(_said("model name")) or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """The processor's instructions that matter here."""
    words = (*_said("flags"), *_said("Features"))
    return tuple(feature for feature in FEATURES if feature in words)


def _said(name: str) -> list[str]:
    """The words that Linux says under `name` of the first processor; none if it says nothing."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        return next((line.partition(":")[2].split() for line in lines if line.startswith(name)), [])
    return []


def processors() -> set[int]:
    """The numbers of the processors that this process may use."""
    return os.sched_getaffinity(0)


def cores() -> int:
    """How many processors this process may use."""
    return len(processors())


def quota() -> float | None:
    """The processors' time that the control group of this process (a container's) may use in a
    second, in seconds; `None`: all there is.
    """
    with suppress(OSError, ValueError):
        limit, period = (CGROUP / "cpu.max").read_text().split()
        return int(limit) / int(period) if limit != "max" else None
    with suppress(OSError, ValueError):
        limit, period = (
            (CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
        )
        return int(limit) / int(period) if int(limit) > 0 else None
    return None


def load() -> float:
    """How many programs and threads wanted to run or waited for a disk, on the mean of the last
    minute.
    """
    return os.getloadavg()[0]


def crowding_hint(threads: int, found: float, count: int) -> str | None:
    """What to know, in a sentence, if `threads` that compute share `count` full processors, by
    their load; else `None`.
    """
    if threads < 2 or found < FULL * count:
        return None
    return (
        f"The processors are full (load {found:.1f} on {count}): meanwhile fewer than {threads} "
        "threads compute, and answers take longer. Stop what else runs."
    )


class Use(NamedTuple):
    """How the processors of this process are used."""

    at_s: float  # of a clock that only goes forward
    busy_s: float  # all programs', since the machine started
    own_s: float  # this process's, since it started


def measured_use() -> Use | None:
    """The use now, in a tenth of a millisecond; `None` where the system does not say it.

    Programs of lower priority do not count: they hardly take time from this one.
    """
    own = {f"cpu{number}".encode() for number in processors()}
    # user, nice, system, idle, iowait, irq, softirq, steal
    counted = (0, 2, 5, 6, 7) if os.getpriority(os.PRIO_PROCESS, 0) <= 0 else (0, 1, 2, 5, 6, 7)
    ticks = 0
    with suppress(OSError, ValueError, IndexError):
        for line in STAT.read_bytes().splitlines():
            name, *times = line.split()
            if name in own:
                ticks += sum(int(times[place]) for place in counted)
        return Use(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())
    return None


class ThreadChoice:
    """The number of threads on which one model computes; used by the thread whose turn it is."""

    def __init__(
        self, most: int, measure: Callable[[], Use | None] = measured_use, count: int | None = None
    ) -> None:
        """At most `most` threads, and no more than the quota allows; `count` processors."""
        limit = quota()
        self._processors = cores() if count is None else count
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
        openmp.use_threads(self.count)

    def end(self) -> None:
        """The calling thread's turn is over: it ends its pool, and gets its own number back."""
        if self.most > 1:
            openmp.use_threads(self.most)
        openmp.release_threads()

    def _choose(self) -> None:
        self._due_s = time.monotonic() + PERIOD_S
        last = self._last
        now = self._last = self._measure()
        if last is None or now is None or now.at_s <= last.at_s:
            return
        others_s = now.busy_s - last.busy_s - (now.own_s - last.own_s)
        free = self._processors - max(0.0, others_s / (now.at_s - last.at_s))
        self.count = min(self.most, max(1, int(free + SHARED)))
