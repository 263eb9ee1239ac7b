"""The processor of this machine, and noticing that torch's threads share it with more work than it
can do.

The threads of a product wait for the last of them. If another program has its processor, all wait,
and every product of a pass takes tens of times as long: a first token of 45 ms was seen to take 4.4
s. One thread waits for no other.
"""

import os
import platform
from contextlib import suppress
from pathlib import Path

# `FEATURES` are the instructions that matter here.
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
# `FULL` is the load for each processor that is too much: our own threads alone make it 1.
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


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))


def load() -> float:
    """How many programs and threads wanted to run or waited for a disk, on the mean of the last
    minute.
    """
    return os.getloadavg()[0]


def crowding_hint(threads: int, found: float, processors: int) -> str | None:
    """What to change, in a sentence, if `threads` that compute share full `processors`, by their
    load; else `None`.
    """
    if threads < 2 or found < FULL * processors:
        return None
    return (
        f"torch computes on {threads} threads while the processors are full (load {found:.1f} on "
        f"{processors}), and "
        "each product may wait for the others' time: set OMP_NUM_THREADS=1, or stop what else runs."
    )
