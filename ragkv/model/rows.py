"""The rows of a pass, which are the prompt positions that are computed in it, and pauses within a
layer of it.

The thread that computes many rows lets others compute between two parts of a layer. Without pauses
a token of another request waits for a whole layer, which takes long where the prompt is long. A
layer calls `pause` between the tiles of its MLP and the heads or blocks of its attention. What
happens then is up to the pass, which says so by `pausing`: a layer of transformers takes no
argument for it, so it is kept for the thread.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

TILE_ROWS = 512  # A pass over more rows than this pauses within its layers.

_thread = threading.local()


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


@contextmanager
def pausing(pause: Callable[[], None] | None) -> Iterator[None]:
    """Inside the block, layers that this thread runs call `pause` between their parts. What it
    raises ends the pass.
    """
    before = getattr(_thread, "pause", None)
    _thread.pause = pause
    try:
        yield
    finally:
        _thread.pause = before


def pause() -> None:
    """Let others compute, if this thread's pass allows it; they may run the same layers meanwhile,
    on this thread.
    """
    if (call := getattr(_thread, "pause", None)) is not None:
        with pausing(None):
            call()
