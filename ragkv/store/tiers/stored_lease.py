"""The part that disk and remote leases share: reading stored layers, decoded or in encoded form."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..codecs import Codec
from ..entry import EncodedEntry, EntryInfo
from .base import Lease
from .disk_file import aligned_empty, scratch_pieces


class StoredLease(Lease):
    """A lease that reads through `_read`."""

    def __init__(self, info: EntryInfo, sensitivity: torch.Tensor | None, codec: Codec, layer_bytes: int) -> None:
        """`layer_bytes` are the bytes of one stored layer."""
        self.info, self.sensitivity = info, sensitivity
        self._codec, self._layer_bytes = codec, layer_bytes

    @property
    def stored_bytes(self) -> int:
        return self.info.layers * self._layer_bytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D), read into `out` or into a new host tensor; see `Lease.read_layer`."""
        return self.read_layers(layer, [out])[0]

    def read_layers(self, first: int, outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        info, codec = self.info, self._codec
        targets = [aligned_empty(info.shape, info.dtype) if out is None else out for out in outs]
        if codec.in_place and all(target.is_contiguous() for target in targets):
            self._read(first, targets)
            return targets
        layout = codec.layout(info.shape, info.dtype)
        pieces = scratch_pieces(len(targets), self._layer_bytes)
        self._read(first, pieces)
        return [
            codec.decode(stored.view(layout.dtype).view(layout.shape), target)
            for stored, target in zip(pieces, targets, strict=True)
        ]

    def read_encoded(self, page_locked: bool = False, before_read: Callable[[], None] = lambda: None) -> EncodedEntry:
        info, codec = self.info, self._codec
        layout = codec.layout(info.shape, info.dtype)
        page_locked = page_locked and codec.in_place and torch.cuda.is_available()
        layers = torch.empty((info.layers, *layout.shape), dtype=layout.dtype, pin_memory=page_locked)
        for first in range(0, info.layers, self.layers_per_read):
            before_read()
            self._read(first, layers[first : first + self.layers_per_read].unbind())
        return EncodedEntry(info, codec, layers, self.sensitivity)

    @abstractmethod
    def _read(self, first: int, into: Sequence[torch.Tensor]) -> None:
        """Fill the contiguous tensors `into` with stored layers from `first` on, verified and counted."""
