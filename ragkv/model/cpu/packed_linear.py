"""Linear layers over copies of their weights that a CPU multiplies faster, without changing a weight.

In bfloat16: oneDNN reorders plain weights in every call, which takes half of the time of one row, a third of the time
of 32 rows and 7 % of 190 rows (896 x 4864). A packed copy is reordered once; its products are equal bit for bit.

In float16 for FBGEMM, which torch brings: it multiplies rows in float32 by weights in float16 and adds in float32.
float16 holds the weights of a bfloat16 checkpoint, but for some of the smallest, and these too if all are multiplied
by a power of two. So a model in bfloat16 is as fast as one in float32 on processors without products in bfloat16, where
torch's own take seven times as long; on processors that have them, one row takes two thirds of the time of a packed
copy; and a model that was widened to float32 reads half of the bytes, by which few rows are bound. The order of the
sums is another one than in torch's own product, as it is for another number of rows.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional

EXPONENT = 15  # The greatest weight of a float16 copy is below 2^15, because float16 ends at 2^16.
# Weights are multiplied by at most this power of two: beyond it rows could become too small for float32.
MOST_SHIFT = 60
# The norm of the changes of an output's weights may be this share of their norm: a float32 sum is rounded by as much.
LOST = 2.0**-24
# Outputs weaker than this share of the strongest count as strong as this share: hardly anything is left of them.
FAINT = 2.0**-14
OFF = 1e-4  # The product of one row may differ from torch's own by this share of the product of both norms.
CHECKED_ROWS = 1024  # So many rows of weights are checked at a time.


class PackedLinear(torch.nn.Module):
    """A bfloat16 linear layer over a copy of its weights in oneDNN's layout."""

    copies = 1  # of its weights

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias  # the plain ones; some models read their dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out)."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return out


def call_packed(operator: Any, *arguments: Any) -> Any:
    """What `operator` of packed weights returns, without two searches in its arguments, a twentieth of a decoding step.

    torch looks for tracing objects, and for a method of the packed weights whose absence is an exception of C++.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(operator, "_op", operator)(*arguments)


class Float16Copy(NamedTuple):
    """The weights of a layer in float16, each times the same power of two."""

    packed: torch.ScriptObject  # with the bias, in FBGEMM's layout
    scale: float  # of the rows: one over that power of two

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) float32 -> (..., out) float32, the bias added."""
        scaled = hidden if self.scale == 1 else hidden * self.scale
        out: torch.Tensor = call_packed(torch.ops.quantized.linear_dynamic_fp16.default, scaled, self.packed)
        return out


class Float16CopyLinear(torch.nn.Module):
    """A linear layer that computes up to `most_rows` rows in float32 from a copy of its weights in float16.

    `many`, the layer itself or its packed copy, computes passes of more rows.
    """

    def __init__(self, many: torch.nn.Linear | PackedLinear, copy: Float16Copy, most_rows: float) -> None:
        super().__init__()
        self.weight, self.bias, self.many = many.weight, many.bias, many
        self.copies = 1 + (many.copies if isinstance(many, PackedLinear) else 0)
        self._copy, self._most = copy, most_rows * many.weight.shape[1]  # numbers of a pass

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out)."""
        if 0 < hidden.numel() <= self._most:
            return self._copy.product(hidden.float()).type_as(hidden)
        out: torch.Tensor = self.many(hidden)
        return out


@torch.no_grad()
def float16_copy(plain: torch.nn.Linear) -> Float16Copy | None:
    """A copy of a layer's weights; `None` if float16 does not hold them, or if this torch cannot multiply by it."""
    weights, bias = plain.weight.detach(), None if plain.bias is None else plain.bias.detach().float()
    least, most = (float(end) for end in torch.aminmax(weights)) if weights.numel() else (0.0, 0.0)
    greatest = max(-least, most)
    if not 0 < greatest < math.inf:
        return None
    largest = EXPONENT - math.frexp(greatest)[1]
    shift = next((shift for shift in (0, largest) if _fits(weights, shift)), None)
    if shift is None:
        return None
    scaled = (weights * 2.0**shift if shift else weights).float()
    row = torch.linspace(0.5, 1, plain.in_features, dtype=torch.float32, device=weights.device)[None]
    try:
        copy = Float16Copy(torch.ops.quantized.linear_prepack_fp16(scaled, bias), 2.0**-shift)
        found, wanted = copy.product(row), functional.linear(row * copy.scale, scaled, bias)
    except (AttributeError, RuntimeError):
        return None
    norms = float(row.norm() * copy.scale * scaled.norm(dim=1).amax())
    return copy if float((found - wanted).abs().amax()) <= OFF * norms else None  # a kernel that multiplies wrongly


def _fits(weights: torch.Tensor, shift: int) -> bool:
    """Whether float16 holds `weights` (out, in) times 2^shift: see `LOST` and `FAINT`."""
    if abs(shift) > MOST_SHIFT:
        return False
    norms, lost = [], []
    for part in torch.split(weights, CHECKED_ROWS):
        scaled = part.float() * 2.0**shift
        norms.append(scaled.norm(dim=1))
        lost.append((scaled.half().float() - scaled).norm(dim=1))
    norm = torch.cat(norms)
    return bool((torch.cat(lost) <= LOST * norm.clamp_min(FAINT * float(norm.amax()))).all())
