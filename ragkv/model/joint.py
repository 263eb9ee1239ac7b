"""Rows of several prompts in one layer: projections, MLPs and experts run once for all, attention
prompt by prompt.

So a pass over one prompt, over several that are fused, decoded, or encoded together, differs in the
parts alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .attention import LayerPass
from .cpu.packing import FEW_ROWS
from .rows import Pause, Rows, no_pause

Seen = tuple[torch.Tensor, torch.Tensor]  # keys and values that rows attend over, each (1, G, S, D)


class PromptRows(Protocol):
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
        parts: Sequence[PromptRows],
        rotate: Callable[[torch.Tensor], torch.Tensor],
        pause: Pause = no_pause,
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
        work.
        """
        if q.shape[2] > FEW_ROWS:
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
