"""A conversation's history as values, which tokens leave it, and its blocks written to the store."""

from .block_writer import BlockWriter
from .history import EMPTY, Block, Chain, History, Part, PartKind, PastTurn, Ranges, SessionState, exact_blocks
from .truncation import TDLS, Discard, Discardable, discardable, find, fitted, keep_dialogue, merged, oldest

__all__ = [
    "Block",
    "BlockWriter",
    "Chain",
    "SessionState",
    "Discard",
    "Discardable",
    "EMPTY",
    "History",
    "Part",
    "PartKind",
    "PastTurn",
    "Ranges",
    "TDLS",
    "discardable",
    "exact_blocks",
    "find",
    "fitted",
    "keep_dialogue",
    "merged",
    "oldest",
]
