"""Fusion: builds the KV of one prompt from many stored entries and recomputes the tokens that a
selector chooses.
"""

from .fuse import Fused, fuse
from .passes import Fusor, PassResult, PreparedPrompt
from .pipeline import LayerReader, Readers
from .plan import Candidates, Plan, Span, SpanKind, SpanState
from .selectors import (
    SELECTORS,
    AskingSelector,
    CheckingSelector,
    Selector,
    StaticSelector,
    budget,
    make_selector,
    with_floor,
)

__all__ = [
    "SELECTORS",
    "AskingSelector",
    "Candidates",
    "CheckingSelector",
    "Fused",
    "Fusor",
    "LayerReader",
    "PassResult",
    "Plan",
    "PreparedPrompt",
    "Readers",
    "Selector",
    "Span",
    "SpanKind",
    "SpanState",
    "StaticSelector",
    "budget",
    "fuse",
    "make_selector",
    "with_floor",
]
