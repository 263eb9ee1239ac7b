"""The contract of what computes an engine's answers: the model of this process (`answer.py`) or a
vLLM server.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ragkv.errors import UnsupportedError
from ragkv.types import Answer, TokenEvent

from .prompt import Task
from .request import PrefilledPrompt, PromptReport, Request

NO_PREFILL = "Another server computes this engine's answers, so it makes no KV of prompts."

# the tokens of an answer, then the answer
AnswerEvents = Generator[TokenEvent | Answer, None, None]


@dataclass(frozen=True, slots=True)
class StartedAnswer:
    """A prompt that was computed, and the answer that follows."""

    report: PromptReport  # a `PrefilledPrompt` if the model here computed the prompt
    events: AnswerEvents

    @property
    def prefill(self) -> PrefilledPrompt:
        """The prompt's KV and logits. Raises `UnsupportedError` if another server has them."""
        if not isinstance(self.report, PrefilledPrompt):
            raise UnsupportedError(NO_PREFILL)
        return self.report


class AnswerBackend(Protocol):
    """Computes prompts that are laid out, and their answers."""

    def refuse_unsupported(self, request: Request) -> None:
        """Raise `UnsupportedError` for what it cannot do, before any work."""
        ...

    def started(self, task: Task) -> AbstractContextManager[StartedAnswer]:
        """Wait to be admitted, and compute the prompt; the answer's events follow in the block."""
        ...
