"""The layers of one entry file, several small ones a request.

Past the page cache nobody reads ahead: a request of 256 KiB, a pause in which it is checked, the next request, and the
disk rests meanwhile. So small layers are read some megabytes at a time and handed out from there; they cost a copy, and
layers that nobody asks for may have been read. Large ones are read one by one to where they are wanted, as all are
through the page cache, where the kernel reads ahead.
"""

import threading
from typing import NamedTuple

import torch

from ..record import Head
from .disk_file import EntryFile, aligned_empty, scratch

BLOCK_BYTES = 4 * 1024**2  # of a request; a lease holds as much while it is read


class _Block(NamedTuple):
    first: int  # layer
    data: torch.Tensor  # bytes from that layer's beginning on; never written to again


class Blocks:
    """Reads the layers of one file. Thread-safe."""

    def __init__(self, file: EntryFile, head: Head) -> None:
        self._file, self._offsets, self._size = file, head.layer_offsets, head.layer_bytes
        self._stride = self._offsets[1] - self._offsets[0] if len(self._offsets) > 1 else 0  # the same for all layers
        self._together = BLOCK_BYTES // self._stride if file.direct and self._stride else 1
        self._lock = threading.Lock()  # who waits for it wants what is being read
        self._block: _Block | None = None

    def read(self, layer: int, into: torch.Tensor | None) -> torch.Tensor:
        """The stored layer's bytes, fewer if the file ends before: in `into`, or valid until this thread reads again.

        Raises `OSError`.
        """
        if self._together <= 1:
            stored = scratch(self._size) if into is None else into
            return stored[: self._file.read(stored, self._offsets[layer])]
        first, data = self._block_of(layer)
        stored = data[(layer - first) * self._stride :][: self._size]
        return stored if into is None else into[: stored.numel()].copy_(stored)

    def _block_of(self, layer: int) -> _Block:
        with self._lock:
            block = self._block
            if block is None or not 0 <= (layer - block.first) * self._stride < block.data.numel():
                count = min(self._together, len(self._offsets) - layer)
                data = aligned_empty((count * self._stride,), torch.uint8)
                block = self._block = _Block(layer, data[: self._file.read(data, self._offsets[layer])])
            return block
