"""Codecs that store plain numbers: as they are, or as bfloat16."""

import math

import torch

from .base import Codec, Layout


class RawCodec(Codec):
    """Layers are stored as the model computed them, bit by bit. Disk reads fill the caller's buffer
    directly; memory returns views of what it stores.
    """

    name = "raw"
    lossless = True
    in_place = True

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        return Layout(shape, dtype)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        return dtype.itemsize * math.prod(shape)

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        return layer.contiguous()

    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out if stored is out else out.copy_(stored)


class BFloat16Codec(Codec):
    """Every number is kept as the nearest bfloat16. So it is never exact.

    This halves the bytes of float32, and saves nothing of float16 and bfloat16. Where "auto"
    computes a bfloat16 checkpoint in float32, because the processor is slow in bfloat16, raw
    entries are twice as wide as the checkpoint; these have its width. NaN, infinities and numbers
    that would become infinite have no code: `encode` returns `None`, and the entry is stored raw.
    """

    name = "bfloat16"
    lossless = False

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        return Layout(shape, torch.bfloat16)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        return torch.bfloat16.itemsize * math.prod(shape)

    def encode(self, layer: torch.Tensor) -> torch.Tensor | None:
        stored = layer.to(torch.bfloat16).contiguous()
        return stored if bool(stored.isfinite().all()) else None

    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(stored)
