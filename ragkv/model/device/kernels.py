"""Which kernels of our own a machine has: Triton comes with torch's builds for CUDA."""

import functools
import importlib.util
from types import ModuleType


@functools.cache
def placing_kernel() -> ModuleType | None:
    """The module `placing_kernel`, where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(".placing_kernel", __package__)
