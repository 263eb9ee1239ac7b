"""Turns what a caller gives into a prompt, and the prompt into an answer. Knows no conversations.

The steps are intake, prompt, look-up and plan, prefill, answer.
"""

from .answer import ActiveAnswer, OwnModel
from .backend import AnswerBackend, AnswerEvents, Serving
from .citations import cite
from .intake import MAX_LOGPROBS, Intake
from .lookup import Lookup
from .prefill import Prefiller
from .prefix_blocks import PrefixBlocks
from .prompt import Prompt, Task
from .request import (
    AnswerOptions,
    ChunkLike,
    Prefill,
    PrefillOptions,
    Request,
    ServedPrompt,
    TurnKV,
)
from .shared_model import SharedModel

__all__ = [
    "MAX_LOGPROBS",
    "ActiveAnswer",
    "AnswerBackend",
    "AnswerEvents",
    "AnswerOptions",
    "ChunkLike",
    "Intake",
    "Lookup",
    "OwnModel",
    "Prefill",
    "PrefillOptions",
    "Prefiller",
    "PrefixBlocks",
    "Prompt",
    "Request",
    "ServedPrompt",
    "Serving",
    "SharedModel",
    "Task",
    "TurnKV",
    "cite",
]
