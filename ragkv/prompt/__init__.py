"""One prompt, from what a caller gives to an answer: intake, plan, prefill, generation. Knows no sessions."""

from .active_answer import ActiveAnswer
from .backend import AnswerBackend, AnswerEvents, ModelBackend
from .citations import cite
from .generation import AnswerGenerator
from .intake import MAX_LOGPROBS, Intake
from .load_control import Controlled, LoadControl, selection_of, shape_of, subject_of
from .parts import EngineParts, SharedModel
from .planner import Planned, Planner
from .prefill import Prefiller
from .request import (
    ActiveRequest,
    AnswerOptions,
    ChunkLike,
    Past,
    Prefill,
    PrefillMethod,
    PrefillOptions,
    Prompt,
    Request,
    ServedPrompt,
    TurnKV,
)
from .request_trace import RequestTrace, traced
from .spans import prompt_spans

__all__ = [
    "MAX_LOGPROBS",
    "ActiveAnswer",
    "ActiveRequest",
    "AnswerBackend",
    "AnswerEvents",
    "AnswerGenerator",
    "AnswerOptions",
    "ChunkLike",
    "Controlled",
    "EngineParts",
    "Intake",
    "LoadControl",
    "ModelBackend",
    "Past",
    "Planned",
    "Planner",
    "Prefill",
    "PrefillMethod",
    "PrefillOptions",
    "Prefiller",
    "Prompt",
    "Request",
    "RequestTrace",
    "ServedPrompt",
    "SharedModel",
    "TurnKV",
    "cite",
    "prompt_spans",
    "selection_of",
    "shape_of",
    "subject_of",
    "traced",
]
