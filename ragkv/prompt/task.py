"""One request while it is served: everything that the steps of the main path share.

It is made when the prompt is laid out and dies with the request. Nothing in it changes; what a step
finds out is its result.
"""

from dataclasses import dataclass

from ragkv.scheduling import Work
from ragkv.types import Answer, TokenEvent

from .prompt import Past, Prompt
from .request import Request, ServedPrompt


@dataclass(frozen=True, slots=True)
class Task:
    """A request with its prompt and its claim on the model."""

    request: Request
    prompt: Prompt
    work: Work
    session_id: str = ""  # of its conversation; "" if it belongs to none
    keep: bool = False  # whether a conversation stores the KV that it makes


@dataclass(frozen=True, slots=True)
class NoTurn:
    """The turn of a request that no conversation keeps."""

    past: Past  # what precedes the prompt; a conversation may be read without a turn
    keeps: bool = False

    def prefilled(self, prompt: Prompt, prefill: ServedPrompt) -> None:
        """Keep nothing."""

    def follow(self, event: TokenEvent | Answer) -> TokenEvent | Answer:
        """Return the event unchanged."""
        return event

    def end(self) -> tuple[str, ...]:
        """Return no notes."""
        return ()
