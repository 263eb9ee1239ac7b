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
    usable,
    with_floor,
)
from .sensitivity import Scorer

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
    "Scorer",
    "Selector",
    "Span",
    "SpanKind",
    "SpanState",
    "StaticSelector",
    "budget",
    "make_selector",
    "usable",
    "with_floor",
]
