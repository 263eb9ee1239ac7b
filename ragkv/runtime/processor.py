"""The processor of this machine, and noticing that torch's threads share it with more work than it can do.

The threads of a product wait for the last of them. If another program has its processor, all wait, and every product of
a pass takes tens of times as long: a first token of 45 ms was seen to take 4.4 s. One thread waits for no other.
"""

import os
import platform
from contextlib import suppress
from pathlib import Path

# `FEATURES` are the instructions that matter here.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")
FULL = 1.5  # `FULL` is the load for each processor that is too much: our own threads alone make it 1.


def cpu_model() -> str:
    """The processor's name as the system reports it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found or platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """The processor's instructions that matter here, as Linux reports them; elsewhere its kind alone."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        words = next((line.split() for line in lines if line.lower().startswith(("flags", "features"))), [])
        return tuple(feature for feature in FEATURES if feature in words)
    return (platform.machine(),)


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """How many programs and threads wanted to run, on the mean of the last minute; `None` if the system does not say.

    On Linux those that wait for a disk count, too.
    """
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def crowding_hint(threads: int, found: float | None, processors: int) -> str | None:
    """What to change, in a sentence, if `threads` that compute share full `processors`, by their load; else `None`."""
    if threads < 2 or found is None or found < FULL * processors:
        return None
    return (
        f"torch computes on {threads} threads while the processors are full (load {found:.1f} on {processors}), and "
        "each product may wait for the others' time: set OMP_NUM_THREADS=1, or stop what else runs."
    )
