"""The `bfloat16` codec: every number is kept as the nearest bfloat16.

It is for models that compute in float32: it halves their bytes. Where "auto" computes a bfloat16
checkpoint in float32, because the processor is slow in bfloat16, raw entries are twice as wide as
the checkpoint; these have its width. They are rounded, so not exact. NaN, infinities and numbers
that would become infinite have no code: `encode` returns `None`, and the entry is stored raw.
"""

import torch

from .base import Codec, Layout


class BFloat16Codec(Codec):
    """Half the bytes of float32; of float16 and bfloat16 it saves nothing."""

    name = "bfloat16"
    lossless = False

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        return Layout(shape, torch.bfloat16)

    def encode(self, layer: torch.Tensor) -> torch.Tensor | None:
        stored = layer.to(torch.bfloat16).contiguous()
        return stored if bool(stored.isfinite().all()) else None

    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(stored)
