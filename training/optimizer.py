"""Muon for the matrices of the blocks, AdamW for everything else, with one learning rate schedule
for both.

Muon (Jordan 2024) replaces a matrix's momentum by its nearest orthogonal matrix, by five
Newton-Schulz steps. Matrices of one shape are stacked, since one batched product is faster than
eight small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.model import Block, Reader

_STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonal(stack: Tensor) -> Tensor:
    """(N, rows, columns) -> the same shape, each close to orthogonal."""
    wide = stack.shape[1] <= stack.shape[2]
    x = (stack if wide else stack.transpose(1, 2)).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in _STEPS:
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = x if wide else x.transpose(1, 2)
    return result


@dataclass(frozen=True)
class Rates:
    """Peak learning rates."""

    muon: float = 0.006
    adam: float = 0.004


class Optimizer:
    """Updates the reader's parameters."""

    def __init__(
        self, reader: Reader, rates: Rates, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        self._rates = rates
        self._momentum = momentum
        self._decay = decay
        blocks = [block for block in reader.blocks if isinstance(block, Block)]
        self._stacks = [
            [getattr(block, name) for block in blocks] for name in ("qkv", "out", "gate_up", "down")
        ]
        matrices = {id(matrix) for stack in self._stacks for matrix in stack}
        gains = [p for p in reader.parameters() if id(p) not in matrices and p.dim() == 1]
        groups = [
            {"params": [reader.embed], "share": 1.0},
            {"params": gains, "share": 0.5},
            {"params": [reader.auxiliary], "share": 0.12},
        ]
        self._adam = torch.optim.AdamW(
            groups, lr=rates.adam, betas=(0.9, 0.98), weight_decay=0.0, eps=1e-10, fused=True
        )
        self._velocity = [torch.zeros(len(stack), *stack[0].shape) for stack in self._stacks]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step at `scale` times the learning rate; gradients are dropped afterwards."""
        muon = self._rates.muon
        adam = self._rates.adam
        for group in self._adam.param_groups:
            group["lr"] = adam * scale * group["share"]
        self._adam.step()
        for stack, velocity in zip(self._stacks, self._velocity, strict=True):
            gradient = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            velocity.lerp_(gradient, 1 - self._momentum)
            update = orthogonal(gradient.lerp(velocity, self._momentum)).float()
            rows, columns = update.shape[1:]
            rate = muon * scale * max(1.0, rows / columns) ** 0.5
            for matrix, change in zip(stack, update, strict=True):
                matrix.mul_(1 - muon * scale * self._decay).add_(change, alpha=-rate)
        for stack in self._stacks:
            for matrix in stack:
                matrix.grad = None
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, object]:
        """The state that a checkpoint saves."""
        return {"adam": self._adam.state_dict(), "velocity": self._velocity}

    def load(self, state: dict[str, object]) -> None:
        """Restores the state of a checkpoint."""
        self._adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
        self._velocity = state["velocity"]  # type: ignore[assignment]
