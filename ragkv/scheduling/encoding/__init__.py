"""Encodes chunks into entries: at once, or in the background after a cache miss."""

from .background import LOG_EVERY_S, BackgroundEncoder
from .encoder import Encoder

__all__ = ["LOG_EVERY_S", "BackgroundEncoder", "Encoder"]
