"""Says which kernels of ours a machine can run. Triton comes with torch's builds for CUDA."""

import functools
import importlib.util
import logging
from types import ModuleType

import torch

log = logging.getLogger(__name__)


@functools.cache
def placing_kernel() -> ModuleType | None:
    """The module `placing_kernel`, where Triton is installed."""
    return _kernel("placing_kernel")


@functools.cache
def gathering_kernel(device: torch.device) -> ModuleType | None:
    """The module `gathering_kernel`, where Triton is installed and `device` reads memory of the
    host; that is tried once.
    """
    module = _kernel("gathering_kernel") if device.type == "cuda" else None
    if module is None:
        return None
    values = torch.arange(24.0).view(8, 3)
    rows = torch.tensor([1, 6])
    try:
        found = module.gather(values.pin_memory(), rows.to(device)).cpu()
    except (RuntimeError, ValueError, TypeError) as error:
        log.warning("The host gathers the values of KCache: %s", error)
        return None
    return module if torch.equal(found, values[rows]) else None


def _kernel(name: str) -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f".{name}", __package__)
