"""The `raw` codec: layers are stored as the model computed them, bit by bit."""

import torch

from .base import Codec, Layout


class RawCodec(Codec):
    """Disk reads fill the caller's buffer directly; memory returns views of what it stores."""

    name = "raw"
    lossless = True
    in_place = True

    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        return Layout(shape, dtype)

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        return layer.contiguous()

    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out if stored is out else out.copy_(stored)
