"""Copies of weights in four bits, for few rows. The time of a decoding step depends on the bytes of
weights that it reads.

GGUF files in four bits (Q4_0, Q4_1, Q4_K) have 16 values, evenly spaced, for each block of 32
inputs. When such a file is unpacked to bfloat16, these grids are kept next to the weights
(`model/gguf_blocks.py`). So a copy changes a weight by no more than rounding to bfloat16 did.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

BLOCK = 32  # inputs of an output that share a step and an offset, as in GGUF's blocks
# outputs that torch keeps together; so tiles of several layers can follow each other
TILE = 64
CENTRE = 8  # torch multiplies counts of steps from here, so that they are signed.
# Weights are on a grid if the changes of a block are at most this share of their norm: rounding to
# bfloat16 takes up to half of it, rounding to four bits four times as much.
LOST = 2.0**-6
LEAST_SPREAD = 0.5  # Counts that are not all equal have a spread of 31/32 or more.
ATTRIBUTE = "int4_grid"  # A linear layer has its grid in this attribute.


class Int4Copy(NamedTuple):
    """The weights of one or more layers that multiply the same rows, in torch's layout for CPUs."""

    packed: torch.Tensor  # (out, in / 2) uint8
    # (in / BLOCK, out, 2) bfloat16: the step of each block, and its value at 8 steps
    grids: torch.Tensor
    bias: torch.Tensor | None  # (out,)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) bfloat16 -> (..., out) bfloat16, the bias added."""
        if hidden.dim() > 2:
            return self.product(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
        out = torch._weight_int4pack_mm_for_cpu(hidden, self.packed, BLOCK, self.grids)
        return out if self.bias is None else out.add_(self.bias)

    @property
    def bytes(self) -> int:
        """Of the copy."""
        return self.packed.nbytes + self.grids.nbytes

    @classmethod
    def joined(cls, copies: Sequence["Int4Copy"]) -> "Int4Copy | None":
        """One product for layers that multiply the same rows; `None` if their outputs fill no whole
        tiles.
        """
        biases = [copy.bias for copy in copies if copy.bias is not None]
        if any(len(copy.packed) % TILE for copy in copies) or len(biases) not in (0, len(copies)):
            return None
        packed = torch.cat([copy.packed for copy in copies])
        grids = torch.cat([copy.grids for copy in copies], dim=1)
        return cls(packed, grids, torch.cat(biases) if biases else None)


class Grid(NamedTuple):
    """Weights (out, in) on a grid for each block: `(count - CENTRE) * step + middle`."""

    counts: torch.Tensor  # (out, in / 2) uint8: of two inputs each, the first in the lower bits
    steps: torch.Tensor  # (out, in / BLOCK) bfloat16
    middles: torch.Tensor  # (out, in / BLOCK) bfloat16

    @classmethod
    def through(cls, counts: torch.Tensor, weights: torch.Tensor) -> "Grid":
        """The grid of weights (out, in) float32, by their counts (out, in) uint8, 0 to 15.

        The middle of a block makes up for what rounding its step to bfloat16 moves.
        """
        of_block = counts.double().view(len(counts), -1, BLOCK)
        blocks = weights.double().view(len(weights), -1, BLOCK)
        apart = of_block - of_block.mean(-1, keepdim=True)
        spread = apart.square().sum(-1)  # 0: its numbers are equal
        steps = ((apart * blocks).sum(-1) / spread.clamp_min(LEAST_SPREAD)).bfloat16()
        middles = blocks.mean(-1) - (of_block.mean(-1) - CENTRE) * steps.double()
        return cls(counts[:, ::2] | counts[:, 1::2] << 4, steps, middles.bfloat16())

    @classmethod
    def of_one_value(cls, value: float, outputs: int, inputs: int) -> "Grid":
        """The grid of weights that all have one value."""
        steps = torch.zeros((outputs, inputs // BLOCK), dtype=torch.bfloat16)
        counts = torch.zeros((outputs, inputs // 2), dtype=torch.uint8)
        return cls(counts, steps, torch.full_like(steps, value))

    def unpacked(self) -> torch.Tensor:
        """The counts (out, in) int32."""
        both = torch.stack((self.counts & 15, self.counts >> 4), dim=-1)
        return both.view(len(self.counts), -1).int()

    def holds(self, weights: torch.Tensor, counts: torch.Tensor) -> bool:
        """Whether weights (out, in) with these counts are on this grid, as far as bfloat16 can
        tell: they are not if they were changed since the grid was made.
        """
        blocks = weights.float().view(len(weights), -1, BLOCK)
        steps = self.steps.float()[..., None]
        grid = (counts.view(blocks.shape) - CENTRE) * steps + self.middles.float()[..., None]
        off = grid.sub_(blocks).square_().sum(dim=-1)
        return bool((off <= LOST**2 * blocks.square_().sum(dim=-1)).all())


def named(grids: Mapping[str, Grid]) -> dict[str, torch.Tensor]:
    """The tensors of grids for a file, as `attach` finds them."""
    return {
        f"{name}.{part}": tensor
        for name, grid in grids.items()
        for part, tensor in grid._asdict().items()
    }


def attach(file: Path, model: torch.nn.Module) -> None:
    """Give the linear layers of a model in bfloat16 the grids that a file has of them."""
    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
        for name, layer in model.named_modules():
            parts = [f"{name}.{part}" for part in Grid._fields]
            if names.issuperset(parts) and layer.weight.dtype is torch.bfloat16:
                setattr(layer, ATTRIBUTE, Grid(*map(opened.get_tensor, parts)))


@torch.no_grad()
def int4_copy(plain: torch.nn.Linear) -> Int4Copy | None:
    """A copy of a layer's weights; `None` if it has no grid or its weights are no longer on it, or
    if this torch cannot multiply by it.
    """
    grid: Grid | None = getattr(plain, ATTRIBUTE, None)
    weights = plain.weight.detach()
    if grid is None or weights.dtype is not torch.bfloat16:
        return None
    counts = grid.unpacked()
    if not grid.holds(weights, counts):
        return None
    pairs = torch.stack((grid.steps, grid.middles), dim=-1).transpose(0, 1).contiguous()
    try:
        made = Int4Copy(torch._convert_weight_to_int4pack_for_cpu(counts, 1), pairs, plain.bias)
        made.product(torch.ones((1, weights.shape[1]), dtype=torch.bfloat16))
    except (AttributeError, RuntimeError):
        return None
    return made
