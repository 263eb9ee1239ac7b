"""The rows of a pass: the prompt positions that are computed in it.

The thread that computes many rows lets others compute between two parts of a layer. Without pauses
a token of another request waits for a whole layer, which takes long where the prompt is long. So a
layer calls the `pause` of its pass between the tiles of its MLP and the heads or blocks of its
attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

TILE_ROWS = 512  # A pass over more rows than this pauses within its layers.

Pause = Callable[[], None]  # lets others compute; what it raises ends the pass


def no_pause() -> None:
    """The pause of a pass that never gives way."""


@dataclass(frozen=True)
class Rows:
    """Ascending prompt positions."""

    positions: torch.Tensor  # (R,) int64
    start: int | None  # the first position where they are contiguous, else None
    # attention's cache
    blocks: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def stop(self) -> int:
        """One past the last position; read from the device at most once."""
        return int(self.positions[-1]) + 1 if self.start is None else self.start + len(self)

    @classmethod
    def of(cls, positions: torch.Tensor) -> "Rows":
        """Rows of ascending `positions` (R,)."""
        count = positions.numel()
        contiguous = count > 0 and int(positions[-1]) - int(positions[0]) + 1 == count
        return cls(positions, int(positions[0]) if contiguous else None)

    def on(self, device: torch.device) -> "Rows":
        """The same rows on `device`; what the host knows of them is not read back, because the host
        would wait.
        """
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
