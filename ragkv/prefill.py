"""What a prefill gives: the prompt's KV and last logits, and the report of how they came to be."""

from dataclasses import dataclass

import torch
from transformers import DynamicCache

from .fusion import Fused
from .types import Reuse, Timing


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt, ready to decode."""

    token_ids: torch.Tensor  # (S,) int64, CPU
    selected_by_layer: tuple[torch.Tensor, ...]  # L tensors of chunk positions recomputed in that layer, int64, CPU
    logits: torch.Tensor  # (V,) float32, after any scaling or capping
    reuse: Reuse
    timing: Timing
    fused: Fused  # the live KV; `cache` copies it

    @property
    def selected(self) -> torch.Tensor:
        """Chunk positions recomputed in the last layer: without question, holes, prefix. int64, CPU."""
        return self.selected_by_layer[-1]

    @property
    def cache(self) -> DynamicCache:
        """A fresh transformers cache: full layers, S rotated positions each, on sliding layers too."""
        return self.fused.kv.to_dynamic_cache()
