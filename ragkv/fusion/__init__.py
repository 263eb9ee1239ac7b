"""Fusion: builds the KV of one prompt from many stored entries and recomputes the tokens that a
selector chooses.
"""

from .fusor import Fused, Fusing, Fusor
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
    "Fusing",
    "Fusor",
    "LayerReader",
    "Plan",
    "Readers",
    "Selector",
    "Span",
    "SpanKind",
    "SpanState",
    "StaticSelector",
    "budget",
    "make_selector",
    "with_floor",
]
