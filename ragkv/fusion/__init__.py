"""Fusion: builds the KV of one prompt from many stored entries and recomputes the tokens that a
selector chooses.
"""

from .fuse import Fused, fuse
from .passes import Fusor, Passed, PromptPass, run_pass
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
    "Passed",
    "Plan",
    "PromptPass",
    "Readers",
    "Selector",
    "Span",
    "SpanKind",
    "SpanState",
    "StaticSelector",
    "budget",
    "fuse",
    "make_selector",
    "run_pass",
    "with_floor",
]
