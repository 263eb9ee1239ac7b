"""The door of the codecs' room: a contract and its siblings, chosen by name."""

from .base import Codec, Layout
from .int8 import Int8Codec
from .raw import RawCodec

RAW = RawCodec()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (RAW, Int8Codec())}

__all__ = ["CODECS", "Codec", "Int8Codec", "Layout", "RAW", "RawCodec"]
