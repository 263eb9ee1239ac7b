"""The processor of this machine."""

import platform
from contextlib import suppress
from pathlib import Path

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")


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


__all__ = ["cpu_features", "cpu_model"]
