"""Rows of several prompts in one layer: projections, MLPs and experts run once for all, attention prompt by prompt.

So a pass over one prompt, over several that are fused, decoded, or encoded together, differs in the parts alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .attention import LayerPass
from .rows import Rows

Seen = tuple[torch.Tensor, torch.Tensor]  # keys and values that rows attend over, each (1, G, S, D)


class PromptRows(Protocol):
    """The rows of one prompt in a pass."""

    rows: Rows

    def put(self, layer: int, k_raw: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor) -> Seen:
        """Keep what a layer made, each (1, G, R, D); what the rows attend over."""
        ...

    def attend(self, layer: int, q_rot: torch.Tensor, seen: Seen, scaling: float, cap: float | None) -> torch.Tensor:
        """Attention of queries (1, H, R, D) over what `put` returned: (1, H, R, D)."""
        ...


class JointPass(LayerPass):
    """One layer in a pass: each prompt is given its part of what the layer makes."""

    def __init__(self, layer: int, parts: Sequence[PromptRows], rotate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`rotate` maps (1, heads, R, D) of all rows to the same, rotated to their positions."""
        super().__init__()
        self._layer, self._parts, self._rotate = layer, parts, rotate
        self._sizes = [len(part.rows) for part in parts]
        self._seen: list[Seen] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass on k_raw and v, each (1, G, R, D). The layer does not use the returned tensors."""
        k_rot = self._rotate(key_states)
        own = map(self._split, (key_states, k_rot, value_states))
        self._seen = [part.put(self._layer, *made) for part, *made in zip(self._parts, *own, strict=True)]
        return k_rot, value_states

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (1, H, R, D) before RoPE -> (1, H, R, D)."""
        own = zip(self._parts, self._split(self._rotate(query)), self._seen, strict=True)
        out = [part.attend(self._layer, q_rot, seen, scaling, softcap) for part, q_rot, seen in own]
        return out[0] if len(out) == 1 else torch.cat(out, dim=2)

    def _split(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        return (states,) if len(self._sizes) == 1 else torch.split_with_sizes(states, self._sizes, 2)
