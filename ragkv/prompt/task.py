"""One request while it is served: everything that the steps of the main path share.

It is made when the prompt is laid out and dies with the request. Nothing in it changes; what a step
finds out is its result.
"""

from dataclasses import dataclass

from ragkv.scheduling import Work

from .prompt import Prompt
from .request import Request


@dataclass(frozen=True, slots=True)
class Task:
    """A request with its prompt and its claim on the model."""

    request: Request
    prompt: Prompt
    work: Work
    session_id: str = ""  # of its conversation; "" if it belongs to none
    keep: bool = False  # whether a conversation stores the KV that it makes
