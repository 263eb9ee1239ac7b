"""Batched decoding: one step of several prompts, each with its own KV, length and positions.

The tokens are B rows of one hidden (1, B, E), so projections, MLPs, experts and the head run once for all rows, in
every family; only attention runs prompt by prompt. The prompts are independent: each step may have others, and a batch
of one costs as much as a single prompt. A prompt may bring drafts, tokens that may follow its last one: then it has a
row for each of them, and the caller keeps those that turn out to be right.

A row is written and attended only through `put` and `attend` of its `PromptKV`. A KV that stores its values elsewhere
overrides these two methods, and this file does not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..adapter import Adapter
from ..attention import LayerPass
from ..promptkv import PromptKV, Recording
from ..rows import Rows


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One prompt in a step."""

    kv: PromptKV  # of every position before the token, with space for all of these
    token: int  # the last decoded token; its position is `kv.length`
    record: Recording | None = None  # receives the tokens' raw KV
    drafts: tuple[int, ...] = ()  # tokens that may follow; only for a KV that `takes_drafts`

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token and its drafts."""
        return (self.token, *self.drafts)


@torch.inference_mode()  # a tenth faster than without gradients alone; what is returned may not be changed in place
def decode_rows(adapter: Adapter, rows: Sequence[DecodeRow]) -> torch.Tensor:
    """One step: logits (B, V) float32 behind each token and draft; each prompt's KV grows by as many positions.

    If it raises, no KV has grown, so the step may be tried again with all or some of the prompts.
    """
    lengths, sizes = [row.kv.length for row in rows], [1 + len(row.drafts) for row in rows]
    ends = [length + size for length, size in zip(lengths, sizes, strict=True)]
    places = [at for length, end in zip(lengths, ends, strict=True) for at in range(length, end)]
    positions = torch.tensor(places, device=adapter.device)  # (B,)
    hidden = adapter.embed(torch.tensor([token for row in rows for token in row.tokens], device=adapter.device))
    rotations = {kind: _rotation(adapter, kind, ends, positions) for kind in adapter.rope_kinds()}
    own_rows = [Rows(own, length) for own, length in zip(torch.split(positions, sizes), lengths, strict=True)]
    step, step_rows = _Step(adapter, rows, own_rows), Rows(positions, None)
    for layer in range(adapter.layer_count):
        step.enter(layer, rotations[adapter.rope_kind(layer)])
        hidden = adapter.call_layer(layer, hidden, step_rows, step)
    logits = adapter.logits(hidden)
    for row, end in zip(rows, ends, strict=True):
        row.kv.length = end
    return logits


def _rotation(
    adapter: Adapter, kind: str, ends: Sequence[int], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (1, B, rotary dims), of each row's position with the frequencies of its own length."""
    if not adapter.rope.depends_on_length:
        return adapter.rope.tables(max(ends)).rows(kind, positions)
    own = [adapter.rope.tables(end, end - 1).span(kind, end - 1, end) for end in ends]  # no drafts: a row each
    cos, sin = (torch.cat(parts, dim=1) for parts in zip(*own, strict=True))
    return cos, sin


class _Step(LayerPass):
    """A step, layer by layer. It passes what the layers make on to each row's own KV."""

    def __init__(self, adapter: Adapter, rows: Sequence[DecodeRow], own_rows: Sequence[Rows]) -> None:
        """`own_rows` are the positions, one for each of `rows`."""
        super().__init__()
        self._adapter, self._rows, self._own_rows = adapter, rows, own_rows
        self._sizes = [len(own) for own in own_rows]
        self._layer = 0
        self._rotation: tuple[torch.Tensor, torch.Tensor]

    def enter(self, layer: int, rotation: tuple[torch.Tensor, torch.Tensor]) -> None:
        """`layer` is computed next; `rotation` is cos and sin, each (1, B, rotary dims)."""
        self._layer, self._rotation = layer, rotation

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write k_raw, rotated, and v, each (1, G, B, D). The layer does not use the returned tensors."""
        k_rot, layer = self._rotated(key_states), self._layer
        own = (self._by_prompt(states) for states in (key_states, k_rot, value_states))
        for row, place, k_raw, own_k_rot, v in zip(self._rows, self._own_rows, *own, strict=True):
            assert place.start is not None
            row.kv.put(layer, place.start, own_k_rot, v)
            if row.record is not None:
                row.record.add(layer, place, k_raw, v)
        return k_rot, value_states

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (1, H, B, D) before RoPE -> (1, H, B, D)."""
        layer, window = self._layer, self._adapter.window(self._layer)
        queries = self._by_prompt(self._rotated(query))
        own = zip(self._rows, self._own_rows, queries, strict=True)
        out = [row.kv.attend(layer, q_rot, place, window, scaling, softcap) for row, place, q_rot in own]
        return torch.cat(out, dim=2) if len(out) > 1 else out[0]

    def _by_prompt(self, states: torch.Tensor) -> Sequence[torch.Tensor]:
        """States (1, heads, B, D), split into those of each prompt's rows."""
        return (states,) if len(self._sizes) == 1 else torch.split_with_sizes(states, self._sizes, 2)

    def _rotated(self, raw: torch.Tensor) -> torch.Tensor:
        return self._adapter.rotate(self._layer, raw, *self._rotation)
