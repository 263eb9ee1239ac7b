"""Packed copies of weights, in the layout in which a CPU multiplies few rows fastest.

oneDNN reorders the plain weights of a linear layer in every call. This takes half of the time of one row, a third of
the time of 32 rows and 7 % of 190 rows (bfloat16, 896 x 4864). A packed copy is reordered once, and its products are
equal bit for bit. It needs as much memory as the weights themselves, so the caller sets a limit. The model keeps its
own weights and is not changed. Later changes of the weights have no effect on the copies; stored entries would not
match them either (see `fingerprint.py`).
"""

import copy
from typing import Any

import torch

from .product_speed import multiplies_bfloat16


class PackedLinear(torch.nn.Module):
    """A linear layer over a packed copy of its weights."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias  # the plain ones; some models read their dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out)."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return out


class Packing:
    """Packs linear layers up to `limit_bytes` of copies; packs nothing where packing is not known to be faster."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._limit_bytes = limit_bytes if limit_bytes and device.type == "cpu" and _is_possible() else 0
        self.made_bytes = 0  # of copies

    def of(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module`, or a view of it with packed linear layers."""
        if _is_plain(module):
            assert isinstance(module, torch.nn.Linear)
            size = module.weight.numel() * module.weight.element_size()
            if self.made_bytes + size > self._limit_bytes:
                return module
            self.made_bytes += size
            return PackedLinear(module)
        parts = {name: None if part is None else self.of(part) for name, part in module._modules.items()}
        return module if parts == module._modules else view_with(module, parts)


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether it is an ordinary bfloat16 linear layer: no hooks, no quantised weights, no adapters."""
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and module.weight.dtype is torch.bfloat16
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


def view_with(module: torch.nn.Module, parts: dict[str, Any]) -> torch.nn.Module:
    """A shallow copy of `module` with other `parts`."""
    view = copy.copy(module)
    view._modules = {**module._modules, **parts}
    return view


def _is_possible() -> bool:
    """Whether this torch has the operators, which are not public, and bfloat16 is fast here; tested by a call."""
    try:
        with torch.no_grad():
            PackedLinear(torch.nn.Linear(2, 2, dtype=torch.bfloat16))(torch.ones((1, 2), dtype=torch.bfloat16))
            return multiplies_bfloat16()
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
