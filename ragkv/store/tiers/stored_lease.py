"""What leases have in common whose tier holds layers in their codec's form: reading them decoded, or as they are."""

from abc import abstractmethod
from collections.abc import Callable

import torch

from ..codecs import Codec
from ..encoded import EncodedEntry
from ..entry import EntryInfo
from .base import Lease
from .disk_file import aligned_empty


class StoredLease(Lease):
    """A lease over `_read`, which brings one stored layer."""

    def __init__(self, info: EntryInfo, sensitivity: torch.Tensor | None, codec: Codec, layer_bytes: int) -> None:
        """`layer_bytes` are a layer's as it is stored."""
        self.info, self.sensitivity = info, sensitivity
        self._codec, self._layer_bytes = codec, layer_bytes

    @property
    def stored_bytes(self) -> int:
        return self.info.layers * self._layer_bytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D), read into `out` or a fresh tensor, on the host; see `Lease.read_layer`."""
        info, codec = self.info, self._codec
        if out is None:
            out = aligned_empty(info.shape, info.dtype)
        if codec.in_place and out.is_contiguous():
            self._read(layer, out.view(-1).view(torch.uint8))
            return out
        layout = codec.layout(info.shape, info.dtype)
        stored = self._read(layer)
        return codec.decode(stored.view(layout.dtype).view(layout.shape), out)

    def read_encoded(self, pin: bool = False, between: Callable[[], None] = lambda: None) -> EncodedEntry:
        info, codec = self.info, self._codec
        layout = codec.layout(info.shape, info.dtype)
        pin = pin and codec.in_place and torch.cuda.is_available()
        layers = torch.empty((info.layers, *layout.shape), dtype=layout.dtype, pin_memory=pin)
        for layer, stored in enumerate(layers):
            between()
            self._read(layer, stored.view(-1).view(torch.uint8))
        return EncodedEntry(info, codec, layers, self.sensitivity)

    @abstractmethod
    def _read(self, layer: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """The stored layer, bytes, verified and counted: in `into`, or in memory good until this thread's next read."""
