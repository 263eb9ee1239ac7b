"""Linear layers that multiply by copies of their weights, because that is faster on a CPU.

`packing.py` chooses and makes the copies.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .int4 import Int4Copy

COPY_BYTES = 2  # of a copy, for each weight
# The most rows of a model in bfloat16 that read copies. For one row oneDNN is slower than copies in
# float16, and copies in four bits are slower with eight rows. All rows of a decoding step with
# drafts read copies, so that they have the bits of single ones.
FEW_ROWS = 4
# FBGEMM's kernels for AVX2 add the products of one or two rows in another order, so three are
# multiplied there.
LEAST_ROWS = 1 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 3


class PackedLinear(torch.nn.Module):
    """A bfloat16 linear layer over a copy of its weights in oneDNN's layout."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        # the plain ones; some models read their dtype
        self.weight = plain.weight
        self.bias = plain.bias
        self.copied_bytes = COPY_BYTES * plain.weight.numel()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out)."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self._packed, self.bias, "none", [], ""
        )
        return out


def call_packed(operator: Any, *arguments: Any) -> Any:
    """What `operator` of packed weights returns, without two searches that take a twentieth of a
    step.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(operator, "_op", operator)(*arguments)


class Float16Copy(NamedTuple):
    """The weights of a layer in float16, each times the same power of two."""

    packed: torch.ScriptObject  # with the bias, in FBGEMM's layout
    scale: float  # of the rows: one over that power of two
    bytes: int

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out) in the same dtype, computed in float32, the bias added."""
        rows = hidden.float()
        if (count := hidden[..., 0].numel()) < LEAST_ROWS:
            rows = functional.pad(rows.reshape(count, -1), (0, 0, 0, LEAST_ROWS - count))
        scaled = rows if self.scale == 1 else rows * self.scale
        out: torch.Tensor = call_packed(
            torch.ops.quantized.linear_dynamic_fp16.default, scaled, self.packed
        )
        return (out if count >= LEAST_ROWS else out[:count].view(*hidden.shape[:-1], -1)).type_as(
            hidden
        )


class CopiedLinear(torch.nn.Module):
    """A linear layer that multiplies up to `most_rows` by a copy of its weights; `many` computes
    passes of more.
    """

    def __init__(
        self,
        many: "torch.nn.Linear | PackedLinear | CopiedLinear",
        copy: Float16Copy | Int4Copy,
        most_rows: float,
    ) -> None:
        super().__init__()
        self.weight: torch.Tensor = many.weight
        self.bias: torch.Tensor | None = many.bias
        self.many = many
        self.copy = copy
        self.copied_bytes = copy.bytes + getattr(many, "copied_bytes", 0)
        self._most = most_rows * self.weight.shape[1]  # numbers of a pass

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out)."""
        if 0 < hidden.numel() <= self._most:
            return self.copy.product(hidden)
        out: torch.Tensor = self.many(hidden)
        return out


def joined(layers: Sequence[Any]) -> Int4Copy | None:
    """One copy for layers that multiply the same few rows, their outputs behind one another;
    `None`: there is none.

    It multiplies up to `FEW_ROWS`. The layers then read their weights in it, too.
    """
    own = [
        one.copy for one in layers if type(one) is CopiedLinear and isinstance(one.copy, Int4Copy)
    ]
    if len(own) < len(layers) or (copy := Int4Copy.joined(own)) is None:
        return None
    shares = torch.split(copy.packed, [len(one.packed) for one in own])
    for layer, one, share in zip(layers, own, shares, strict=True):
        layer.copy = one._replace(packed=share)
    return copy
