"""Encodes chunks into entries, at once or in the background if a request missed them; scores them from stored KV."""

from .background import BackgroundEncoder
from .encoder import Encoder
from .rescoring import Rescorer, RescoreReport
from .scores import StoredScores
from .single_flight import EncodingClaim, SingleFlight
from .warming import Warmer, WarmReport

__all__ = [
    "BackgroundEncoder",
    "Encoder",
    "EncodingClaim",
    "RescoreReport",
    "Rescorer",
    "SingleFlight",
    "StoredScores",
    "WarmReport",
    "Warmer",
]
