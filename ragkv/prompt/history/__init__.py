"""A conversation's history as values, its truncation, and the saving of its blocks."""

from .block_writer import SAVE_WAIT_S, BlockWriter
from .history import (
    EMPTY,
    REWINDABLE,
    Block,
    Chain,
    History,
    Part,
    PartKind,
    PastTurn,
    SessionState,
    exact_blocks,
    with_turn,
)
from .truncation import fitted, merged

__all__ = [
    "Block",
    "BlockWriter",
    "Chain",
    "SessionState",
    "EMPTY",
    "History",
    "Part",
    "PartKind",
    "PastTurn",
    "REWINDABLE",
    "SAVE_WAIT_S",
    "exact_blocks",
    "fitted",
    "merged",
    "with_turn",
]
