"""Copies of weights in four bits, for few rows: a decoding step is bound by the bytes of the
weights that it reads.

GGUF files in four bits (Q4_0, Q4_1, Q4_K) have 16 values, evenly spaced, for each block of 32
inputs. They are found again in the weights that were unpacked to bfloat16, so the copy changes a
weight by no more than that rounding did.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

BLOCK = 32  # So many inputs of an output share a step and an offset, as in GGUF's blocks.
# torch keeps so many outputs together, so that tiles of several layers can stand behind one
# another.
TILE = 64
STEPS = 15  # A block has so many steps, which four bits count.
# Weights are on a grid if the changes of a block are at most this share of their norm: rounding to
# bfloat16 takes up to half of it, rounding to four bits four times as much.
LOST = 2.0**-6
LEAST_STEP = 1e-30  # The step of a block whose numbers are all equal.
TRIED_OUTPUTS = 16  # So many outputs show whether a search in all of them is worth its time.


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


class _Grids(NamedTuple):
    """Weights on a grid for each block: `(steps - 8) * step + middle`."""

    steps: torch.Tensor  # (out, in) int32, 0 to STEPS
    step: torch.Tensor  # (out, in / BLOCK) bfloat16
    middle: torch.Tensor  # (out, in / BLOCK) bfloat16


@torch.no_grad()
def int4_copy(plain: torch.nn.Linear) -> Int4Copy | None:
    """A copy of a layer's weights; `None` if they are on no grid, or if this torch cannot multiply
    by it.
    """
    weights = plain.weight.detach()
    if (
        weights.dtype is not torch.bfloat16
        or weights.shape[1] % BLOCK
        or _grids(weights[:TRIED_OUTPUTS]) is None
    ):
        return None
    found = _grids(weights)
    return None if found is None else _packed(found, plain.bias)


def _packed(grids: _Grids, bias: torch.Tensor | None) -> Int4Copy | None:
    pairs = torch.stack((grids.step, grids.middle), dim=-1).transpose(0, 1).contiguous()
    try:
        made = Int4Copy(torch._convert_weight_to_int4pack_for_cpu(grids.steps, 1), pairs, bias)
        made.product(torch.ones((1, grids.steps.shape[1]), dtype=torch.bfloat16))
    except (AttributeError, RuntimeError):
        return None
    return made


def _grids(weights: torch.Tensor) -> _Grids | None:
    """The grids of weights (out, in), if they are on such; a block need not use all of its
    steps.
    """
    blocks = weights.float().reshape(-1, BLOCK)
    low = blocks.amin(1, True)
    high = blocks.amax(1, True)
    step = (high - low) / STEPS
    counts = _counted(blocks, low, step)
    left = _off_grid(blocks, low, step, counts).nonzero()[:, 0]
    for used in range(STEPS - 1, 0, -1):
        if not len(left):
            break
        some = blocks[left]
        tried = (high - low)[left] / used
        step[left], counts[left] = tried, _counted(some, low[left], tried)
        left = left[_off_grid(some, low[left], tried, counts[left])]
    return None if len(left) else _centred(blocks, counts, step, weights.shape)


def _counted(blocks: torch.Tensor, low: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """How many steps each number of blocks (N, BLOCK) is above `low` (N, 1)."""
    return (blocks - low).div_(step.clamp_min(LEAST_STEP)).round_()


def _off_grid(
    blocks: torch.Tensor, low: torch.Tensor, step: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Which blocks (N, BLOCK) are no `counts` of steps above `low` (N, 1), (N,) bool."""
    off = torch.addcmul(low, counts, step).sub_(blocks).square_().sum(dim=1)
    return off > LOST**2 * blocks.square().sum(dim=1)


def _centred(
    blocks: torch.Tensor, counts: torch.Tensor, step: torch.Tensor, shape: torch.Size
) -> _Grids:
    """The grids of blocks (N, BLOCK) of weights of `shape`; the middle makes up for what the step's
    rounding moves.
    """
    step = step.bfloat16()
    middle = (blocks.mean(1, True) - (counts.mean(1, True) - 8) * step.float()).bfloat16()
    return _Grids(counts.int().view(shape), step.view(shape[0], -1), middle.view(shape[0], -1))
