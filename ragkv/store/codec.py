"""Codecs: how a layer slice is laid down in a stored record, and how it comes back.

A codec knows shapes and dtypes, no files and no checksums: the record hashes whatever bytes a codec yields, so damage
is found before decoding. `raw` keeps the model's own bits; a lossy codec (int8, say) is a sibling registered here.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from .entry import EntryInfo


class Codec(ABC):
    """Turns a layer slice (2, G, T, D) into one stored tensor and back."""

    name: ClassVar[str]  # what the record's metadata says

    @abstractmethod
    def stored_shape(self, info: EntryInfo) -> tuple[int, ...]:
        """Shape of one stored layer of `info`."""

    @abstractmethod
    def stored_dtype(self, info: EntryInfo) -> torch.dtype:
        """Dtype of one stored layer of `info`."""

    @abstractmethod
    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        """The contiguous tensor to store for a layer slice (2, G, T, D). Does not modify `layer`; may be it."""

    @abstractmethod
    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` (2, G, T, D) from a stored layer and return it. `stored` may be `out` itself for `raw`."""


class RawCodec(Codec):
    """The model's own bits: read straight into the caller's buffer."""

    name = "raw"

    def stored_shape(self, info: EntryInfo) -> tuple[int, ...]:
        return (2, info.kv_heads, info.tokens, info.head_dim)

    def stored_dtype(self, info: EntryInfo) -> torch.dtype:
        return info.dtype

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        return layer.contiguous()

    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out if stored is out else out.copy_(stored)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(),)}
