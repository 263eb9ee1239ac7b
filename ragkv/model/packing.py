"""Weights a second time, in the layout in which a CPU multiplies few rows fastest.

oneDNN rearranges a linear layer's plain weights in every call: half of the time of one row, a third of that of 32, 7 %
of that of 190 (bfloat16, 896 x 4864). Here they are rearranged once, and the products are the same, bit for bit. The
price is memory, as much as the weights themselves take, so the caller says how much there is. The model keeps its own
and is not changed. Weights changed later are not seen; entries would not fit them either (see `fingerprint.py`).
"""

import copy
from typing import Any

import torch

from .products import multiplies_bfloat16


class PackedLinear(torch.nn.Module):
    """A linear layer over its weights' copy."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias  # the layer's own; some models look at their dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out)."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return out


class Packing:
    """Packs linear layers until `limit_bytes` of copies are made; nothing where packing is not known to pay."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self._limit_bytes = limit_bytes if limit_bytes and device.type == "cpu" and _is_possible() else 0
        self.made_bytes = 0  # of copies

    def of(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module`, or a view of it whose linear layers are packed."""
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
    """Whether it is a linear layer of bfloat16 and nothing but one: no hooks, no quantised weights, no adapters."""
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and module.weight.dtype is torch.bfloat16
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


def view_with(module: torch.nn.Module, parts: dict[str, Any]) -> torch.nn.Module:
    """A shallow copy of `module` that differs in those parts."""
    view = copy.copy(module)
    view._modules = {**module._modules, **parts}
    return view


def _is_possible() -> bool:
    """Whether this torch has the operators, which are not of its public interface, and this CPU bfloat16: tried."""
    try:
        with torch.no_grad():
            PackedLinear(torch.nn.Linear(2, 2, dtype=torch.bfloat16))(torch.ones((1, 2), dtype=torch.bfloat16))
            return multiplies_bfloat16()
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
