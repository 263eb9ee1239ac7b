"""Codecs say how a layer slice is stored and read back: one contract, its implementations, and
their names.

A codec knows shapes and dtypes, but no files, checksums or entries. A record computes its checksums
over the encoded bytes, so damage is found before decoding.
"""

import torch

from .base import Codec, Layout
from .int8 import Int8Codec
from .plain import BFloat16Codec, RawCodec

RAW = RawCodec()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW, BFloat16Codec(), Int8Codec())}


def stored_bytes(
    codec: str, tokens: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """The bytes of an entry of so many tokens as the codec of that name stores it."""
    return layers * CODECS[codec].nbytes((2, kv_heads, tokens, head_dim), dtype)


__all__ = [
    "CODECS",
    "RAW",
    "BFloat16Codec",
    "Codec",
    "Int8Codec",
    "Layout",
    "RawCodec",
    "stored_bytes",
]
