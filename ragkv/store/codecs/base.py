"""The contract of a codec: how a layer slice is laid down wherever it is kept, and how it comes back.

A codec knows shapes and dtypes, no files, no checksums and no entries: the record hashes whatever bytes a codec yields,
so damage is found before decoding.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch


class Layout(NamedTuple):
    """What one stored layer is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one stored layer."""
        size = self.dtype.itemsize
        for side in self.shape:
            size *= side
        return size


class Codec(ABC):
    """Turns a layer slice (2, G, T, D) into one stored tensor and back. Stateless, so thread-safe."""

    name: ClassVar[str]  # in settings, identities and records
    lossless: ClassVar[bool]  # every bit comes back; else a span read through it is never exact
    in_place: ClassVar[bool] = False  # a stored layer is the slice itself: it may be served as a view, unread

    @abstractmethod
    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        """What a stored layer is, for slices of `shape` (2, G, T, D) and `dtype`."""

    @abstractmethod
    def encode(self, layer: torch.Tensor) -> torch.Tensor | None:
        """The contiguous tensor to store for a layer slice (2, G, T, D), on its device; `None` if it cannot be told.

        Does not modify `layer`; may be it. An entry of which one layer cannot be encoded is kept raw.
        """

    @abstractmethod
    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` (2, G, T, D) from a stored layer and return it. `stored` may be `out` itself for `raw`."""
