"""The rows of a pass, of one prompt or several, and the arguments that a layer gets for them.

A layer receives a `LayerPass` instead of its cache and its mask, so a pass has its own state. A
pass has rows of prompts (`promptkv.py`), of prompts that decode together (`decode/batching.py`), or
of token runs (`token_runs.py`). Projections, MLPs and experts run once for all rows. Attention runs
prompt by prompt.

A thread that computes many rows lets others compute between two parts of a layer. Without such
pauses another request's token would wait for a whole layer, which takes long for a long prompt. So
a layer calls the `pause` of its pass between the tiles of its MLP, and between the heads or blocks
of its attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import Cache

from ragkv.runtime import no_check

from .cpu.copied import FEW_ROWS

TILE_ROWS = 512  # A pass over more rows than this pauses within its layers.

Pause = Callable[[], None]  # lets others compute; what it raises ends the pass


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. A host does not wait: what it sends to CUDA is page-locked first."""
    if tensor.device == device:
        return tensor
    locked = tensor.pin_memory() if device.type == "cuda" else tensor
    return locked.to(device, non_blocking=True)


@dataclass(frozen=True)
class Rows:
    """Ascending prompt positions."""

    positions: torch.Tensor  # (R,) int64
    start: int | None  # the first position where they are contiguous, else None
    # what all layers need of these rows: of attention, of decoding, and of a `Recording`
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    # the masks of a device's attention (`device/masked.py`), which are narrowed with the rows
    masks: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

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
        """These rows on `device`; what the host knows of them is not read back, because the host
        would wait.
        """
        if self.positions.device == device:
            return self
        stop = self.stop if len(self) else 0
        return Rows.unread(sent(self.positions, device), stop, self.start)

    @classmethod
    def unread(cls, positions: torch.Tensor, stop: int, start: int | None = None) -> "Rows":
        """Rows of ascending `positions` (R,) that only the device knows; the last is `stop` - 1."""
        made = cls(positions, start)
        made.__dict__["stop"] = stop
        return made

    def narrowed(self, kept: torch.Tensor, positions: torch.Tensor) -> "Rows":
        """The rows of ascending index `kept` (C,), which are at `positions`; the last is kept."""
        made = Rows.unread(positions, self.stop)
        for name, masks in self.masks.items():
            if (own := masks.narrowed(kept)) is not None:
                made.masks[name] = own
        return made

    @cached_property
    def last(self) -> "Rows":
        """The last of the rows alone."""
        return Rows(self.positions[-1:], self.stop - 1)

    @classmethod
    def span(cls, start: int, stop: int, device: torch.device) -> "Rows":
        """The contiguous rows `start ... stop - 1`."""
        return cls(torch.arange(start, stop, device=device), start)

    def __len__(self) -> int:
        return self.positions.numel()


class LayerPass(Cache):
    """What a layer gets as its cache and as its mask: it takes the keys and values, and computes
    the attention.
    """

    def __init__(self, pause: Pause = no_check) -> None:
        """`pause` is called between the parts of a long layer."""
        super().__init__(layers=[])
        self.pause = pause

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Queries (1, H, R, D) before RoPE, keys and values as `update` returned them -> (1, H, R,
        D).
        """
        raise NotImplementedError

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """`update` and `attend` at once: all (1, heads, R, D) before RoPE -> (1, H, R, D)."""
        return self.attend(q, *self.update(k, v, layer), scaling, softcap)


Seen = tuple[torch.Tensor, torch.Tensor]  # keys and values that rows attend over, each (1, G, S, D)


class PassPart(Protocol):
    """The rows of one prompt in a pass."""

    rows: Rows

    def put(self, layer: int, k_raw: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor) -> Seen:
        """Keep what a layer made, each (1, G, R, D); what the rows attend over."""
        ...

    def attend(
        self,
        layer: int,
        q_rot: torch.Tensor,
        seen: Seen,
        scaling: float,
        cap: float | None,
        pause: Pause,
    ) -> torch.Tensor:
        """Attention of queries (1, H, R, D) over what `put` returned: (1, H, R, D)."""
        ...


class JointPass(LayerPass):
    """One layer in a pass: each prompt is given its part of what the layer makes."""

    def __init__(
        self,
        layer: int,
        parts: Sequence[PassPart],
        rotate: Callable[[torch.Tensor], torch.Tensor],
        pause: Pause = no_check,
    ) -> None:
        """`rotate` maps (1, heads, R, D) of all rows to the same, rotated to their positions."""
        super().__init__(pause)
        self._layer = layer
        self._parts = parts
        self._rotate = rotate
        self._seen: list[Seen] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass on k_raw and v, each (1, G, R, D). The layer does not use the returned tensors."""
        self._put(key_states, self._rotate(key_states), value_states)
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Queries (1, H, R, D) before RoPE -> (1, H, R, D)."""
        return self._attend(self._rotate(query), scaling, softcap)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Rotates few queries and keys together, because calls of torch take longer than their
        work; on a device any number.
        """
        if q.shape[2] > FEW_ROWS and q.device.type == "cpu":
            return super().run(q, k, v, layer, scaling, softcap)
        q_rot, k_rot = self._rotate(torch.cat((q, k), dim=1)).split_with_sizes(
            (q.shape[1], k.shape[1]), dim=1
        )
        self._put(k, k_rot, v)
        return self._attend(q_rot, scaling, softcap)

    def _put(self, *made: torch.Tensor) -> None:
        """Give each prompt its part of what a layer made, each (1, G, R, D)."""
        own = map(self._split, made)
        self._seen = [
            part.put(self._layer, *its) for part, *its in zip(self._parts, *own, strict=True)
        ]

    def _attend(self, q_rot: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
        own = zip(self._parts, self._split(q_rot), self._seen, strict=True)
        out = [
            part.attend(self._layer, q, seen, scaling, softcap, self.pause) for part, q, seen in own
        ]
        return out[0] if len(out) == 1 else torch.cat(out, dim=2)

    def _split(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        return (
            (states,)
            if len(self._parts) == 1
            else states.split_with_sizes([len(p.rows) for p in self._parts], 2)
        )
