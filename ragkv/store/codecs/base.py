"""The contract of a codec, which defines the stored form of a layer."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch


class Layout(NamedTuple):
    """Shape and dtype of one stored layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Codec(ABC):
    """Turns a layer slice (2, G, T, D) into one stored tensor and back. Stateless, so
    thread-safe.
    """

    name: ClassVar[str]  # in settings, identities and records
    # decoding returns every bit; a span read through a lossy codec is never exact
    lossless: ClassVar[bool]
    # a stored layer is the slice itself, so memory can serve it as a view
    in_place: ClassVar[bool] = False

    @abstractmethod
    def layout(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Layout:
        """Shape and dtype of a stored layer, for slices of `shape` (2, G, T, D) and `dtype`."""

    @abstractmethod
    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        """Bytes of such a stored layer."""

    @abstractmethod
    def encode(self, layer: torch.Tensor) -> torch.Tensor | None:
        """The contiguous tensor to store for a layer slice (2, G, T, D), on its device; `None` if
        it has no code.

        Does not modify `layer`, and may return it. If one layer of an entry has no code, the whole
        entry is stored raw.
        """

    @abstractmethod
    def decode(self, stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` (2, G, T, D) from a stored layer and return it. For `raw`, `stored` may be
        `out` itself.
        """
