"""A conversation: the ids of its turns so far.

History stands before new chunks, so that it is an exact prefix. Its KV is not stored yet, so it is computed with every
turn, which is exact; the report counts it as computed.
"""

import threading

from .intake import Prompt
from .model.layout import TemplateRuns


class Session:
    """One conversation's history. Its turns are serialised by `lock`."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.lock = threading.Lock()
        self._token_ids: tuple[int, ...] = ()
        self.turns = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The history that the next turn stands behind, without the application's prefix."""
        return self._token_ids

    def append(self, prompt: Prompt, answer: tuple[int, ...], runs: TemplateRuns) -> None:
        """Add a turn: what the prompt asked, its answer, and the template's runs between turns."""
        asked = prompt.token_ids[len(prompt.prefix) :]
        self._token_ids = asked + answer + runs.after_answer + runs.before_next_turn
        self.turns += 1

    def reset(self) -> None:
        """Forget every turn."""
        self._token_ids = ()
        self.turns = 0
