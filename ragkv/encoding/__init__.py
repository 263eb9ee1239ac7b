"""Encodes chunks into entries: at once, or in the background if a request missed them."""

from .background import BackgroundEncoder
from .encoder import Encoder
from .single_flight import EncodingClaim, SingleFlight
from .warming import Warmer, WarmReport

__all__ = ["BackgroundEncoder", "Encoder", "EncodingClaim", "SingleFlight", "WarmReport", "Warmer"]
