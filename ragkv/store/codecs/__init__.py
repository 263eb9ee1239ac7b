"""Codecs say how a layer slice is stored and read back: one contract and its implementations.

A codec knows shapes and dtypes, but no files, checksums or entries. A record computes its checksums
over the encoded bytes, so damage is found before decoding.
"""

from functools import cache
from pkgutil import resolve_name

import torch

from ragkv.registry import CODECS

from .base import Codec, Layout


@cache
def codec_of(name: str) -> Codec:
    """The codec of that name in `CODECS`."""
    made: Codec = resolve_name(CODECS[name])()
    return made


RAW = codec_of("raw")


def stored_bytes(
    codec: str, tokens: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """The bytes of an entry of so many tokens as the codec of that name stores it."""
    return layers * codec_of(codec).nbytes((2, kv_heads, tokens, head_dim), dtype)


__all__ = [
    "RAW",
    "Codec",
    "Layout",
    "codec_of",
    "stored_bytes",
]
