"""Brings an entry into the form in which tiers store it, once, so that it is rounded only once.

The identity names its codec. If this codec cannot represent the values (NaN, infinities), the entry
is stored raw. Then it takes more bytes, and is read back unchanged.
"""

import torch

from .codecs import RAW, Codec, codec_of
from .entry import Entry, StoredEntry


def stored_form(entry: Entry | StoredEntry, page_locked: bool = False) -> StoredEntry:
    """`entry` in its identity's codec, in host memory, keeping nothing else alive. Itself, or its
    tensors, if it is so already.

    With `page_locked` and CUDA, layers are in page-locked memory, because they are copied to the
    device as they are.
    """
    if isinstance(entry, Entry):
        codec = codec_of(entry.info.identity.codec)
        layers = entry.kv if codec.in_place else _stored_layers(codec, entry)
        if layers is None:
            codec = RAW
            layers = entry.kv
        entry = StoredEntry(entry.info, codec, layers)
    layers = _compact(entry.layers, page_locked and torch.cuda.is_available())
    return entry if layers is entry.layers else StoredEntry(entry.info, entry.codec, layers)


def _stored_layers(codec: Codec, entry: Entry) -> torch.Tensor | None:
    """The stored layers, (L, ...), on the entry's device; `None` if the codec has no code for one
    of them.
    """
    layout = codec.layout(entry.info.shape, entry.info.dtype)
    stored = torch.empty(
        (entry.info.layers, *layout.shape), dtype=layout.dtype, device=entry.kv.device
    )
    for layer, target in zip(entry.kv, stored, strict=True):
        code = codec.encode(layer)
        if code is None:
            return None
        target.copy_(code)
    return stored


def _compact(tensor: torch.Tensor, page_locked: bool) -> torch.Tensor:
    """`tensor` in host memory, contiguous. A view would keep its whole base tensor alive, beyond a
    tier's capacity.
    """
    tensor = tensor.detach() if tensor.requires_grad else tensor
    owns_memory = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    if tensor.device.type == "cpu" and owns_memory and (tensor.is_pinned() or not page_locked):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=page_locked).copy_(tensor)
