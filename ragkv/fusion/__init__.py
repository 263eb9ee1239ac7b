"""Fusion: one prompt's KV from many entries. Plans, selectors, the layer pipeline and the fusor."""

from .fusor import Fused, Fusor
from .guard import raised_ratio
from .learned import ScoreModel
from .pipeline import LayerReader
from .plan import Candidates, Plan, Span, SpanKind, SpanState
from .readers import Readers
from .resident import ResidentLease
from .selectors import SELECTORS, AskingSelector, CheckingSelector, Selector, StaticSelector, make_selector, usable
from .sensitivity import Scorer

__all__ = [
    "SELECTORS",
    "AskingSelector",
    "Candidates",
    "CheckingSelector",
    "Fused",
    "Fusor",
    "LayerReader",
    "Plan",
    "Readers",
    "ResidentLease",
    "ScoreModel",
    "Scorer",
    "Selector",
    "Span",
    "SpanKind",
    "SpanState",
    "StaticSelector",
    "make_selector",
    "raised_ratio",
    "usable",
]
