"""The processors of this machine, and how busy they are.

Linux counts the busy time of each processor. The part that this process did not use was used by
others. `openmp.py` chooses the number of threads by it. Pressure (`/proc/pressure/cpu`) would not
suffice: it says that a thread waited, not whether one more thread would find a free processor.
"""

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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


def cpu_load() -> float:
    """How many programs and threads wanted to run or waited for a disk, on the mean of the last
    minute.
    """
    return os.getloadavg()[0]


def crowding_hint(threads: int, found: float, count: int) -> str | None:
    """A sentence for the user if `threads` compute on `count` processors that are full, as their
    load `found` says; `None` if they are not.
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
