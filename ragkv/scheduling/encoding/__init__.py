"""Encodes chunks into entries, at once or in the background if a request missed them."""

from .background import BackgroundEncoder
from .encoder import Encoder, neutral_ids
from .warming import Warmer, WarmReport

__all__ = ["BackgroundEncoder", "Encoder", "WarmReport", "Warmer", "neutral_ids"]
