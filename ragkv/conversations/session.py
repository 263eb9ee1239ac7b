"""One conversation, as callers hold it. Its state is an immutable `SessionState`, which `Sessions`
replaces.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ragkv.errors import InputError
from ragkv.prompt.history import (
    REWINDABLE,
    History,
    SessionState,
    merged,
)
from ragkv.runtime import Check, acquired, no_check

if TYPE_CHECKING:
    from .sessions import Sessions


class Session:
    """One conversation. `Engine.session` makes it; `lock` lets one turn run at a time."""

    def __init__(
        self,
        sessions: "Sessions",
        session_id: str,
        state: SessionState,
        notes: tuple[str, ...] = (),
        saved: bool = True,
    ) -> None:
        self.session_id = session_id
        self.saved = saved
        self.lock = threading.Lock()
        self.state = state
        self.notes = notes  # for the report of the next turn
        self._noting = threading.Lock()  # a turn and the write of the one before change them
        self.version: str | None = None  # the storage's name of `state`; None: it does not keep it
        # the newest write to disk; its result is a note if it failed
        self.write: Future[str | None] | None = None
        self.deleted = False
        self.sessions = sessions  # that made it, with the storage and the blocks
        self._thread: int | None = None  # the thread that holds the session

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The history that the next turn builds on, without the application's prefix."""
        return self.state.history.token_ids

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return len(self.state.turns)

    @property
    def title(self) -> str:
        """What the conversation is called in lists; "" if it has no title."""
        return self.state.title

    @property
    def history(self) -> History:
        """What the next turn builds on."""
        return self.state.history

    def note(self, *notes: str) -> None:
        """Add sentences for the report of the next turn, each once."""
        with self._noting:
            self.notes = tuple(dict.fromkeys((*self.notes, *notes)))

    def take_notes(self, told: Sequence[str]) -> tuple[str, ...]:
        """Remove the notes that were `told`; returns them."""
        with self._noting:
            taken = tuple(note for note in self.notes if note in told)
            self.notes = tuple(note for note in self.notes if note not in told)
        return taken

    def wait_saved(self, timeout_s: float) -> str | None:
        """Return when the last turn is on disk. If that takes longer than `timeout_s` or fails, returns
        a note for its report.

        Call it when the turn has ended: the session is not held meanwhile, and its next turn may
        run.
        """
        return self.sessions.storage().wait_saved(self, timeout_s)

    def reset(self, check: Check = no_check) -> None:
        """Delete every turn, and the blocks that no other conversation has. Like all that changes a
        conversation it waits for a turn under way, and raises what `check` raises meanwhile.
        """
        with self.held(check):
            self.sessions.clear(self)

    def delete(self, check: Check = no_check) -> None:
        """Delete the conversation: its manifest, and its blocks in every tier where no other
        session has them. Twice is harmless, also by two threads at once.
        """
        try:
            with self.held(check):
                self.sessions.delete(self)
        except InputError:
            if not self.deleted:
                raise

    def fork(self, session_id: str, check: Check = no_check) -> "Session":
        """A new conversation with the same past; both share its blocks. Raises `InputError` if that
        id has turns, and what `check` raises while a turn of that one is waited for.
        """
        with self.sessions.blocks.copied(self) as past:  # without a turn that is under way
            other = self.sessions.open(session_id)
            if other is self:
                raise InputError(
                    f"{session_id!r} is the id of the conversation to be forked itself: choose "
                    "another."
                )
            with other.held(check):
                if other.turns:
                    raise InputError(
                        f"There is a conversation {session_id!r} already: choose another id, or "
                        "delete it."
                    )
                now = self.sessions.clock()
                self.sessions.commit(other, lambda _: replace(past, created_at=now))
        return other

    def rewind(self, turns: int = 1, check: Check = no_check) -> None:
        """Go back to before the last `turns` turns, to ask again or ask differently.

        Raises `InputError` if there are fewer turns, or for more than `REWINDABLE`.
        """
        with self.held(check):
            past = self.state.turns
            began = past[-turns].began if 1 <= turns <= len(past) else None
            if began is None:
                raise InputError(
                    f"Cannot rewind {turns} turns: {self.session_id!r} has {len(past)}, and goes "
                    f"back by at least 1 and at most {REWINDABLE}."
                )
            self.sessions.commit(
                self, lambda state: replace(state, turns=past[:-turns], history=began)
            )

    def discard(self, ranges: Iterable[tuple[int, int]], check: Check = no_check) -> int:
        """Drop these ranges of indices from the history now; returns how many tokens were
        dropped. Raises what `check` raises while a turn is waited for.
        """
        with self.held(check):
            history = self.state.history
            dropped = merged(ranges, len(history))
            return self._replace(history.without(dropped) if dropped else history)

    def _replace(self, history: History) -> int:
        """Make `history` the conversation's; returns how many tokens fewer it has."""
        before = self.state.history
        if history is not before:
            self.sessions.commit(self, lambda state: replace(state, history=history))
        return len(before) - len(history)

    def check_exists(self) -> None:
        """Raise `InputError` if the session was deleted."""
        if self.deleted:
            raise InputError(
                f"Session {self.session_id!r} was deleted; ask the engine for a new one."
            )

    @contextmanager
    def held(self, check: Check = no_check) -> Iterator[None]:
        """Hold the session, and bring it up to date. Raises what `check` raises while this
        thread waits for it.

        Raises `InputError` if the session was deleted, or if this thread holds it already: it would
        wait for itself.
        """
        if self._thread == threading.get_ident() and self.lock.locked():
            raise InputError(
                f"Session {self.session_id!r} has an answer under way on this thread: finish or "
                "close its stream first."
            )
        with acquired(self.lock, check):
            self.check_exists()
            self._thread = threading.get_ident()
            try:
                self.sessions.refresh(self)
                yield
            finally:
                self._thread = None
