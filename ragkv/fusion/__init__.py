"""Fusion: builds the KV of one prompt from many stored entries and recomputes the tokens that a
selector chooses.
"""

from .fuse import Fused, fuse
from .passes import Fusor, JointPassFailed, PassResult, PreparedPrompt
from .pipeline import LayerReader, Readers
from .plan import Candidates, Plan, Span, SpanKind, SpanState
from .selectors import Recompute, Selection, Selector, budget, make_selector, with_floor

__all__ = [
    "Candidates",
    "Fused",
    "Fusor",
    "JointPassFailed",
    "LayerReader",
    "PassResult",
    "Plan",
    "PreparedPrompt",
    "Readers",
    "Recompute",
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
