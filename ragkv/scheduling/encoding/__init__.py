"""Encodes chunks into entries, at once or in the background if a request missed them; scores them from stored KV."""

from .background import BackgroundEncoder
from .encoder import Encoder, StoredScores, neutral_ids
from .warming import Warmer, WarmReport

__all__ = [
    "BackgroundEncoder",
    "Encoder",
    "StoredScores",
    "WarmReport",
    "Warmer",
    "neutral_ids",
]
