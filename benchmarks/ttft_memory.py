"""Peak memory of one action beyond the memory before it: the high-water mark of the process or the device."""

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(action: Callable[[], Any], device: str) -> dict[str, int]:
    """Run `action` once: `peak_bytes` beyond the memory allocated before, `process_bytes` in total."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        whole = torch.cuda.max_memory_allocated()
        return {"peak_bytes": whole - before, "process_bytes": whole}
    _trim()
    before = _status("VmRSS") if STATUS.exists() else _high_water()
    if CLEAR.exists():
        CLEAR.write_text("5")  # resets the high-water mark, see proc(5)
    action()
    whole = _high_water()
    return {"peak_bytes": whole - before, "process_bytes": whole}


def _high_water() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux's unit; without /proc this is a guess


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def _trim() -> None:
    """Return freed memory to the system, so that the action's memory is visible."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
