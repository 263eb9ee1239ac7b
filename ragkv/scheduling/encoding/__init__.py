"""Encodes chunks into entries: at once, or in the background after a cache miss."""

from .background import LOG_EVERY_S, BackgroundEncoder
from .contexts import Contexts, neutral_ids
from .encoder import Encoder

__all__ = ["LOG_EVERY_S", "BackgroundEncoder", "Contexts", "Encoder", "neutral_ids"]
