"""The processor of this machine."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The processor's name as the system reports it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found or platform.processor() or platform.machine()


__all__ = ["cpu_model"]
