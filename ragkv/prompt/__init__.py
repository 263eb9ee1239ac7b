"""Turns what a caller gives into a prompt, and the prompt into an answer. Knows no conversations.

The steps are intake, prompt, look-up and plan, prefill, answer.
"""

from .answer import ActiveAnswer, LocalBackend
from .backend import NO_PREFILL, AnswerBackend, AnswerEvents, StartedAnswer
from .citations import MARKER, cite
from .intake import MAX_LOGPROBS, Intake, check_names
from .lookup import Lookup
from .prefill import Prefiller
from .prefix_blocks import PrefixBlocks
from .prompt import Prompt, Task, chunks_among, stored_ids
from .request import (
    AnswerOptions,
    ChunkLike,
    PieceLike,
    PrefilledPrompt,
    PrefillOptions,
    PromptReport,
    Request,
    TurnKV,
)
from .shared_model import SharedModel

__all__ = [
    "NO_PREFILL",
    "MARKER",
    "MAX_LOGPROBS",
    "ActiveAnswer",
    "AnswerBackend",
    "AnswerEvents",
    "AnswerOptions",
    "ChunkLike",
    "PieceLike",
    "Intake",
    "LocalBackend",
    "Lookup",
    "PrefilledPrompt",
    "PrefillOptions",
    "Prefiller",
    "PrefixBlocks",
    "Prompt",
    "Request",
    "PromptReport",
    "StartedAnswer",
    "SharedModel",
    "Task",
    "TurnKV",
    "check_names",
    "cite",
    "chunks_among",
    "stored_ids",
]
