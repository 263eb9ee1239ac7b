"""Codecs turn a layer's KV into the bytes that are stored: a contract and its implementations, chosen by name."""

from .base import Codec, Layout
from .int8 import Int8Codec
from .raw import RawCodec

RAW = RawCodec()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW, Int8Codec())}

__all__ = ["CODECS", "Codec", "Int8Codec", "Layout", "RAW", "RawCodec"]
