"""The contract of what computes an engine's answers: the model of this process (`answer.py`) or a
vLLM server.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ragkv.types import Answer, TokenEvent

from .prompt import Task
from .request import Request, ServedPrompt

# the tokens of an answer, then the answer
AnswerEvents = Generator[TokenEvent | Answer, None, None]


@dataclass(frozen=True, slots=True)
class Serving:
    """A prompt that was served, and the answer that follows."""

    prefill: ServedPrompt
    events: AnswerEvents


class AnswerBackend(Protocol):
    """Serves prompts that are laid out. Holds no request's state; any number of threads may call it."""

    makes_kv: bool  # whether a prompt's KV and logits are made here: `serve` gives a `Prefill`

    def check(self, request: Request) -> None:
        """Raise `UnsupportedError` for what it cannot do, before any work."""
        ...

    def serve(self, task: Task) -> AbstractContextManager[Serving]:
        """Wait to be admitted, and serve the prompt; the answer's events follow in the block."""
        ...
