"""The rows of a pass: the prompt positions that are computed in it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class Rows:
    """Ascending prompt positions."""

    positions: torch.Tensor  # (R,) int64
    start: int | None  # the first position where they are contiguous, else None
    blocks: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # attention's cache

    @cached_property
    def stop(self) -> int:
        """One past the last position; read from the device once."""
        return int(self.positions[-1]) + 1

    @classmethod
    def of(cls, positions: torch.Tensor) -> "Rows":
        """Rows of ascending `positions` (R,)."""
        count = positions.numel()
        contiguous = count > 0 and int(positions[-1]) - int(positions[0]) + 1 == count
        return cls(positions, int(positions[0]) if contiguous else None)

    def on(self, device: torch.device) -> "Rows":
        """The same rows on `device`; what the host knows of them is not read back, because the host would wait."""
        if self.positions.device == device:
            return self
        moved = Rows(self.positions.to(device), self.start)
        if len(self):
            moved.__dict__["stop"] = self.stop
        return moved

    @classmethod
    def span(cls, start: int, stop: int, device: torch.device) -> "Rows":
        """The contiguous rows `start ... stop - 1`."""
        return cls(torch.arange(start, stop, device=device), start)

    def __len__(self) -> int:
        return self.positions.numel()
