"""Codecs turn a layer's KV into the bytes that are stored: a contract and its implementations,
chosen by name.
"""

from .base import Codec, Layout
from .bfloat16 import BFloat16Codec
from .int8 import Int8Codec
from .raw import RawCodec

RAW = RawCodec()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW, BFloat16Codec(), Int8Codec())}

__all__ = ["BFloat16Codec", "CODECS", "Codec", "Int8Codec", "Layout", "RAW", "RawCodec"]
