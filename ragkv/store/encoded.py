"""An entry in the form in which tiers keep it: its layers as its codec laid them down.

The codec is the identity's. An entry it cannot represent (not a number, infinities) is kept raw under the same
identity: it costs more bytes and comes back as it was. Encoded once, an entry is copied between tiers as it is, so that
rounding happens once.
"""

from dataclasses import dataclass
from typing import Union

import torch

from .codecs import CODECS, RAW, Codec
from .entry import Entry, EntryInfo, compact_tensor


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """What a tier is given and holds. Immutable."""

    info: EntryInfo
    codec: Codec  # of `layers`: the identity's, or `raw`
    layers: torch.Tensor  # (L, ...) stored layers, contiguous once `settled`; the entry's own (L, 2, G, T, D) if raw
    sensitivity: torch.Tensor | None = None  # (T, C) float16, as it was measured on what was encoded

    @classmethod
    def of(cls, entry: Union[Entry, "EncodedEntry"]) -> "EncodedEntry":
        """`entry` in its identity's codec; itself if it is encoded already. Shares the tensors of a raw one."""
        if isinstance(entry, EncodedEntry):
            return entry
        codec = CODECS[entry.info.identity.codec]
        layers = entry.kv if codec.in_place else _encoded(codec, entry)
        if layers is None:
            codec, layers = RAW, entry.kv
        return cls(entry.info, codec, layers, entry.sensitivity)

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys and values as they are held."""
        return self.layers.nbytes

    @property
    def size_bytes(self) -> int:
        """Bytes of what is held, with scores."""
        return self.layers.nbytes + (0 if self.sensitivity is None else self.sensitivity.nbytes)

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The slice (2, G, T, D): a view where the codec keeps it in place, else decoded into `out` or a new tensor."""
        stored = self.layers[layer]
        if self.codec.in_place:
            return stored
        return self.codec.decode(stored, torch.empty(self.info.shape, dtype=self.info.dtype) if out is None else out)

    def compact(self, page_locked: bool = False) -> "EncodedEntry":
        """This entry on the host, contiguous, owning no more memory than it needs; itself when it already is so.

        Pinned if `page_locked`, CUDA is there, and it is copied to the device from where it lies.
        """
        layers = compact_tensor(self.layers, page_locked and self.codec.in_place)
        scores = None if self.sensitivity is None else compact_tensor(self.sensitivity, page_locked=False)
        if layers is self.layers and scores is self.sensitivity:
            return self
        return EncodedEntry(self.info, self.codec, layers, scores)


def _encoded(codec: Codec, entry: Entry) -> torch.Tensor | None:
    """The stored layers, (L, ...), where the entry is; `None` if the codec cannot tell one of them."""
    layout = codec.layout(entry.info.shape, entry.info.dtype)
    stored = torch.empty((entry.info.layers, *layout.shape), dtype=layout.dtype, device=entry.kv.device)
    for layer, target in zip(entry.kv, stored, strict=True):
        encoded = codec.encode(layer)
        if encoded is None:
            return None
        target.copy_(encoded)
    return stored
