"""Fusion: builds the KV of one prompt from many stored entries and recomputes the tokens that a
selector chooses.
"""

from .fuse import Fused, fuse
from .passes import Fusor, PassResult, PreparedPrompt
from .pipeline import LayerReader, Readers
from .plan import Candidates, Plan, Span, SpanKind, SpanState
from .selectors import Selection, Selector, budget, make_selector, with_floor

__all__ = [
    "Candidates",
    "Fused",
    "Fusor",
    "LayerReader",
    "PassResult",
    "Plan",
    "PreparedPrompt",
    "Readers",
    "Selection",
    "Selector",
    "Span",
    "SpanKind",
    "SpanState",
    "budget",
    "fuse",
    "make_selector",
    "with_floor",
]
