"""Who computes answers: the model in this process, or another server to which the prompt's token ids are sent."""

from collections.abc import Generator
from typing import Protocol

from ragkv.store import PrefetchHint
from ragkv.types import Answer, TokenEvent

from .generation import AnswerGenerator
from .planner import Planner
from .prefill import Prefiller
from .request import ActiveRequest, Request

AnswerEvents = Generator[TokenEvent | Answer, None, None]  # the tokens of an answer, then the answer


class AnswerBackend(Protocol):
    """Serves prompts that are laid out. Holds no request's state; any number of threads may call it."""

    makes_kv: bool  # whether a prompt's KV and logits are made here: `begin` sets a `Prefill`

    def check(self, request: Request) -> None:
        """Raise `UnsupportedError` for what it cannot do, before any work."""
        ...

    def prefetch_hint(self, active: ActiveRequest) -> PrefetchHint:
        """What it will read of this engine's store."""
        ...

    def begin(self, active: ActiveRequest) -> AnswerEvents:
        """Serve the prompt and set `active.prefill`; the answer's events follow.

        What is held until the request ends goes to `active.held`.
        """
        ...


class ModelBackend:
    """The engine's own model computes."""

    makes_kv = True

    def __init__(self, planner: Planner, prefiller: Prefiller, generator: AnswerGenerator) -> None:
        self._planner, self._prefiller, self._generator = planner, prefiller, generator

    def check(self, request: Request) -> None:
        """Whatever the intake lets through is served."""

    def prefetch_hint(self, active: ActiveRequest) -> PrefetchHint:
        """The history's blocks and the chunks."""
        return self._planner.prefetch_hint(active)

    def begin(self, active: ActiveRequest) -> AnswerEvents:
        """Fuse and compute the prompt; then decode."""
        self._prefiller.prefill(active)
        return self._generator.stream(active)
