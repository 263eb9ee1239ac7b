"""A lease is an entry that a tier found, held for reading.

A lease of a local tier pins its entry. While the lease is open, the entry is not evicted and its
bytes are not reused. Identity, token ids and checksums are verified before a lease returns
anything. If they are wrong, it raises `EntryDamagedError`, the tier drops the entry, and the caller
treats it as a miss. All methods are thread-safe. Reads release the GIL.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch

from ragkv.errors import EntryDamagedError
from ragkv.runtime import Closing

from ..codecs import RAW, Codec
from ..entry import EntryInfo, StoredEntry
from ..record import RecordHead


class Lease(Closing):
    """One entry held for reading. Use it as a context manager."""

    info: EntryInfo
    kind: str  # of the tier
    # `read_layer` returns views of the tier's own storage and needs no `out`
    in_place: bool = False
    codec: Codec = RAW  # of the stored layers
    _on_close: "Callable[[Lease], None] | None" = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys and values as they are stored, so the bytes of reading all layers once."""
        return self.info.size_bytes

    def prefetch(self) -> None:
        """All layers will be read, in order: a remote tier begins to fetch them."""

    @abstractmethod
    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer slice (2, G, T, D) of `layer`, verified.

        Returns either `out` (contiguous, same shape and dtype, filled) or a view of the tier's own
        immutable storage: never write to the result. Raises `EntryDamagedError`; the tier has then
        dropped the entry.
        """

    def read_stored(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """`layer` as it is stored, verified, for a device that unpacks it: `out`, or a view of what
        is in memory.
        """
        return self.read_layer(layer, out)

    @abstractmethod
    def read_entry(self) -> StoredEntry:
        """A verified copy of the entry as it is stored. Raises as `read_layer` does."""

    @abstractmethod
    def release(self) -> None:
        """Unpin the entry. Twice is harmless."""

    def on_close(self, hand_to: "Callable[[Lease], None]") -> None:
        """When it is closed, call `hand_to` with it instead, which closes it again. Not after
        damage.
        """
        self._on_close = hand_to

    def close(self) -> None:
        """The reader needs it no more."""
        hand_to = self._on_close
        self._on_close = None
        if hand_to is None:
            self.release()
        else:
            hand_to(self)


class StoredLease(Lease):
    """What leases of disk and remote tiers share: what `_read` reads is decoded or copied."""

    def __init__(self, head: RecordHead) -> None:
        """`head` is that of the entry's record, verified."""
        self.info = head.info
        self.codec = head.codec
        self._head = head

    @property
    def stored_bytes(self) -> int:
        return self.info.layers * self._head.layer_bytes

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Lease.read_layer`; without `out` the slice is a new host tensor."""
        info = self.info
        target = torch.empty(info.shape, dtype=info.dtype) if out is None else out
        in_place = self.codec.in_place and target.is_contiguous()
        return self.codec.decode(self.read_stored(layer, target if in_place else None), target)

    def read_stored(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The stored layer, read into `out` or into a new host tensor."""
        layout = self.codec.layout(self.info.shape, self.info.dtype)
        stored = torch.empty(layout.shape, dtype=layout.dtype) if out is None else out
        try:
            self._read(layer, stored)
        except EntryDamagedError:
            self._on_close = None
            raise
        return stored

    def read_entry(self) -> StoredEntry:
        info = self.info
        codec = self._head.codec
        layout = codec.layout(info.shape, info.dtype)
        layers = torch.empty((info.layers, *layout.shape), dtype=layout.dtype)
        for number, layer in enumerate(layers):
            self._read(number, layer)
        return StoredEntry(info, codec, layers)

    # an abandoned lease must not keep its pin, its descriptor or its part of a cache for ever
    def __del__(self) -> None:
        self.release()

    @abstractmethod
    def _read(self, layer: int, into: torch.Tensor) -> None:
        """Fill the contiguous tensor `into` with the stored layer, verified and counted."""
