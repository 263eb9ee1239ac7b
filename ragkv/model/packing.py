"""Copies of weights that make products faster on a CPU, for all linear layers of a model (see `packed_linear`).

A copy needs as much memory as weights of two bytes each, so the caller sets a limit. The model keeps its own weights
and is not changed. Later changes of the weights have no effect on the copies; stored entries would not match them
either (see `fingerprint.py`).
"""

import copy
from typing import Any

import torch

from .product_speed import with_copy

COPY_BYTES = 2  # of a weight


class Packing:
    """Copies linear layers up to `limit_bytes`, where that is known to be faster."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._limit_bytes = limit_bytes if device.type == "cpu" else 0
        self.made_bytes = 0  # of copies

    def of(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module`, or a view of it with copied linear layers."""
        if _is_plain(module):
            assert isinstance(module, torch.nn.Linear)
            size = COPY_BYTES * module.weight.numel()
            made = with_copy(module) if self.made_bytes + size <= self._limit_bytes else None
            self.made_bytes += 0 if made is None else size
            return made or module
        parts = {name: None if part is None else self.of(part) for name, part in module._modules.items()}
        return module if parts == module._modules else view_with(module, parts)


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether it is an ordinary linear layer: no hooks, no quantised weights, no adapters."""
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


def view_with(module: torch.nn.Module, parts: dict[str, Any]) -> torch.nn.Module:
    """A shallow copy of `module` with other `parts`."""
    view = copy.copy(module)
    view._modules = {**module._modules, **parts}
    return view
