"""Chunks encoded into entries: at once, or in the background for chunks that requests missed."""

from .background import BackgroundEncoder
from .encoder import Encoder
from .single_flight import EncodingClaim, Pace, SingleFlight

__all__ = ["BackgroundEncoder", "Encoder", "EncodingClaim", "SingleFlight", "Pace"]
