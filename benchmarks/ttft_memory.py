"""Peak memory of one action, beyond what was there before it: the process's high-water mark, or the device's."""

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(action: Callable[[], Any], device: str) -> dict[str, int]:
    """Runs `action` once: `peak_bytes` on top of what was allocated, `process_bytes` in all."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        whole = torch.cuda.max_memory_allocated()
        return {"peak_bytes": whole - before, "process_bytes": whole}
    _trim()
    before = _status("VmRSS") if STATUS.exists() else _high_water()
    if CLEAR.exists():
        CLEAR.write_text("5")  # the high-water mark begins anew, see proc(5)
    action()
    whole = _high_water()
    return {"peak_bytes": whole - before, "process_bytes": whole}


def _high_water() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux's unit; where /proc is missing, a guess


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _trim() -> None:
    """Give freed memory back, so that what the action takes is seen."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
