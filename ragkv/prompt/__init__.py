"""One prompt, from what a caller gives to an answer: intake, plan, prefill, generation. Knows no
sessions.
"""

from .citations import cite
from .generation import (
    ActiveAnswer,
    AnswerBackend,
    AnswerEvents,
    AnswerGenerator,
    ModelBackend,
)
from .intake import MAX_LOGPROBS, Intake
from .load_control import LoadControl
from .planner import Planner
from .prefill import Prefiller
from .profiling import Profiler
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
from .shared_model import SharedModel

__all__ = [
    "MAX_LOGPROBS",
    "ActiveAnswer",
    "ActiveRequest",
    "AnswerBackend",
    "AnswerEvents",
    "AnswerGenerator",
    "AnswerOptions",
    "ChunkLike",
    "Intake",
    "LoadControl",
    "ModelBackend",
    "Past",
    "Planner",
    "Prefill",
    "PrefillMethod",
    "PrefillOptions",
    "Prefiller",
    "Profiler",
    "Prompt",
    "Request",
    "ServedPrompt",
    "SharedModel",
    "TurnKV",
    "cite",
]
