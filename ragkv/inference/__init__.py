"""One prompt, from checked input to an answer: intake, plan, prefill, generation. Knows no sessions."""

from .citations import cite
from .generation import AnswerGenerator
from .intake import Intake
from .load_control import Controlled, LoadControl, selection_of, shape_of, subject_of
from .parts import EngineParts, SharedModel
from .planner import Planned, Planner
from .prefill import Made, Prefill, Prefiller
from .request import AnswerOptions, ChunkLike, How, Past, PrefillOptions, Prompt
from .spans import prompt_spans

__all__ = [
    "AnswerOptions",
    "PrefillOptions",
    "EngineParts",
    "SharedModel",
    "AnswerGenerator",
    "ChunkLike",
    "LoadControl",
    "Controlled",
    "How",
    "Intake",
    "Made",
    "Past",
    "Planned",
    "Planner",
    "Prefill",
    "Prefiller",
    "Prompt",
    "cite",
    "prompt_spans",
    "selection_of",
    "shape_of",
    "subject_of",
]
