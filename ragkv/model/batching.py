"""Decoding for many: one step of B prompts at once, each with its own KV, length and positions.

The B tokens are B rows of one hidden (1, B, E), so projections, MLPs, experts and the head run once for all, in every
family as it is; only attention is each row's own. Rows know nothing of each other: who takes part is decided anew for
each step, and a batch of one costs what one alone costs.

The seam: a row is written and attended by its KV alone, through `put` and `attend` of `PromptKV`. A KV that keeps its
values elsewhere overrides these two and nothing here changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from .adapter import Adapter
from .promptkv import PromptKV, Recording
from .rows import Rows


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """What one prompt brings to a step."""

    kv: PromptKV  # of every position before the token's, with room for one more
    token: int  # the token decoded last; its position is `kv.length`
    record: Recording | None = None  # is given the token's raw KV


@torch.no_grad()
def decode_rows(adapter: Adapter, rows: Sequence[DecodeRow]) -> torch.Tensor:
    """One step of B rows: logits (B, V) float32; each row's KV is one position longer.

    If it raises, no row's KV has grown: the step may be tried again, with all of the rows or some.
    """
    lengths = [row.kv.length for row in rows]
    positions = torch.tensor(lengths, device=adapter.device)  # (B,)
    hidden = adapter.embed(torch.tensor([row.token for row in rows], device=adapter.device))
    turns = {kind: _turns(adapter, kind, lengths, positions) for kind in adapter.rope_kinds()}
    places = [Rows(positions[at : at + 1], length) for at, length in enumerate(lengths)]
    for layer in range(adapter.layer_count):
        cos, sin = turns[adapter.rope_kind(layer)]
        step = _LayerStep(adapter, layer, rows, places, cos, sin)
        hidden = adapter.call_layer(layer, hidden, Rows(positions, None), _BatchMask(step), _BatchCache(step))
    logits = adapter.logits(hidden)
    for row, length in zip(rows, lengths, strict=True):
        row.kv.length = length + 1
    return logits


def _turns(
    adapter: Adapter, kind: str, lengths: Sequence[int], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (1, B, rotary dims), of each row's position under the frequencies of its own length."""
    if not adapter.rope.depends_on_length:
        return adapter.rope.tables(max(lengths) + 1).rows(kind, positions)
    own = [adapter.rope.tables(length + 1, length).span(kind, length, length + 1) for length in lengths]
    cos, sin = (torch.cat(parts, dim=1) for parts in zip(*own, strict=True))
    return cos, sin


@dataclass(frozen=True, slots=True)
class _LayerStep:
    """One layer's share of a step."""

    adapter: Adapter
    layer: int
    rows: Sequence[DecodeRow]
    places: Sequence[Rows]  # of each row, its position
    cos: torch.Tensor  # (1, B, rotary dims)
    sin: torch.Tensor

    def rotate(self, raw: torch.Tensor) -> torch.Tensor:
        """Queries or keys (1, heads, B, D), each row to its own place."""
        return self.adapter.rotate(self.layer, raw, self.cos, self.sin)


class _BatchCache(Cache):
    """What a layer sees as its cache: gives each row's key and value to that row's own KV."""

    def __init__(self, step: _LayerStep) -> None:
        super().__init__(layers=[])
        self._step = step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put k_raw, rotated, and v, each (1, G, B, D), where they belong. What the layer gets back is not used."""
        k_rot = self._step.rotate(key_states)
        for at, (row, place) in enumerate(zip(self._step.rows, self._step.places, strict=True)):
            own = slice(at, at + 1)
            assert place.start is not None
            row.kv.put(layer_idx, place.start, k_rot[:, :, own], value_states[:, :, own])
            if row.record is not None:
                row.record.add(layer_idx, place, key_states[:, :, own], value_states[:, :, own])
        return k_rot, value_states


@dataclass(frozen=True, slots=True)
class _BatchMask:
    """What a layer takes for its mask: lets each row attend over its own KV."""

    step: _LayerStep

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (1, H, B, D) before RoPE -> (1, H, B, D)."""
        step, q_rot = self.step, self.step.rotate(query)
        window = step.adapter.window(step.layer)
        out = [
            row.kv.attend(step.layer, q_rot[:, :, at : at + 1], window, scaling, softcap)
            for at, row in enumerate(step.rows)
        ]
        return torch.cat(out, dim=2)
