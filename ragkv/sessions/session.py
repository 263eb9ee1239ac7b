"""One session, as callers hold it. Its state is an immutable `SessionState`, which each change
replaces. `sessions.py` has all sessions of an engine.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ragkv.errors import InputError, SessionUnavailableError
from ragkv.prompt.history import REWINDABLE, History, SessionState, merged
from ragkv.runtime import Check, FairLock, no_check

if TYPE_CHECKING:
    from .sessions import Sessions


class Session:
    """A conversation that an engine keeps under an id. `Engine.session` makes it; `lock` lets one
    turn run at a time.
    """

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
        self.lock = FairLock()  # turns run in the order in which they came
        self.state = state
        self.notes = notes  # for the report of the next turn
        # guards `notes`, which a turn and the write of the turn before it change
        self._noting = threading.Lock()
        self.version: str | None = None  # the storage's name of `state`; None: it does not keep it
        # the newest write to disk; its result is a note if it failed
        self._write: Future[str | None] | None = None
        self.deleted = False
        self.sessions = sessions  # that made it, with the storage and the blocks
        # The thread that holds the session; None: none does, or its stream went to another thread.
        # No id: once a thread has ended, another one may have its id.
        self._thread: threading.Thread | None = None
        # Guards `state`, `version` and the two fields below: a time to live may be set while a turn
        # runs. Nobody waits for a disk or a server while holding it.
        self._changing = threading.Lock()
        # whether the storage saves or deletes a state just now, which replaces `state` then
        self._is_replaced = False
        self._ttl_waits = False  # whether a time to live that was set meanwhile is saved after that

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
        """What the session is called in lists; "" if it has no title."""
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
        """Return when the last turn is on disk. If that takes longer than `timeout_s` or fails,
        returns a note for its report.

        Call it when the turn has ended: the session is not held meanwhile, and its next turn may
        run.
        """
        if self._write is None:
            return None
        try:
            return self._write.result(timeout_s)
        except TimeoutError:
            return (
                f"the conversation was not written to disk within {timeout_s:g} s: it is lost "
                "if the process is killed"
            )

    def reset(self, check: Check = no_check) -> None:
        """Delete every turn, and the blocks that no other session has. Like all that changes a
        session it waits for a turn under way, and raises what `check` raises meanwhile.
        """
        with self.held(check):
            self._clear()

    def delete(self, check: Check = no_check) -> None:
        """Delete the session: its manifest, and its blocks in every tier where no other session
        has them. Twice is harmless, also by two threads at once.
        """
        try:
            with self.held(check):
                self._clear()
                self.deleted = True
                if self.saved:
                    self.sessions.forget(self.session_id)
        except InputError:
            if not self.deleted:
                raise

    def fork(self, session_id: str, check: Check = no_check) -> "Session":
        """A new session with the same past; both share its blocks. Raises `InputError` if that id
        has turns, and what `check` raises while a turn of that one is waited for.
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
                other.commit(lambda _: replace(past, created_at=now))
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
            self.commit(lambda state: replace(state, turns=past[:-turns], history=began))

    def discard(self, ranges: Iterable[tuple[int, int]], check: Check = no_check) -> int:
        """Drop these ranges of indices from the history now; returns how many tokens were
        dropped. Raises what `check` raises while a turn is waited for.
        """
        with self.held(check):
            history = self.state.history
            dropped = merged(ranges, len(history))
            if not dropped:
                return 0
            shorter = history.without(dropped)
            self.commit(lambda state: replace(state, history=shorter))
            return len(history) - len(shorter)

    @contextmanager
    def held(self, check: Check = no_check) -> Iterator[None]:
        """Hold the session, and bring it up to date. Raises what `check` raises while this
        thread waits for it.

        Raises `InputError` if the session was deleted, or if this thread holds it already: it would
        wait for itself.
        """
        if self._thread is threading.current_thread():
            raise InputError(
                f"Session {self.session_id!r} has an answer under way on this thread: finish or "
                "close its stream first."
            )
        with self.lock.hold(check=check):
            self.check_exists()
            self._thread = threading.current_thread()
            try:
                self._refresh()
                yield
            finally:
                self._thread = None

    def continued(self) -> None:
        """The stream that holds the session continues. If this is another thread than before, any
        thread may be next: then `held` waits on every thread.
        """
        if self._thread is not threading.current_thread():
            self._thread = None

    def check_exists(self) -> None:
        """Raise `InputError` if the session was deleted."""
        if self.deleted:
            raise InputError(
                f"Session {self.session_id!r} was deleted; ask the engine for a new one."
            )

    def bring_up_to_date(self) -> None:
        """Refresh a session that is only read. If a turn of it runs, the next one refreshes it.
        Raises `SessionUnavailableError`.
        """
        if self.lock.acquire(waits=False):
            try:
                self._refresh()
            finally:
                self.lock.release()

    def commit(
        self,
        change: Callable[[SessionState], SessionState],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Change the state, save it, and delete the blocks that no history has any more. The caller
        holds the session.

        Once `is_over`, no room for the write is waited for. If it raises, the state is unchanged.
        """
        with self._replacing() as before:
            state = replace(change(before), used_at=self.sessions.clock())
            if self.saved:
                self._save(state, is_over)
            with self._changing:
                if self.state.ttl_s != before.ttl_s:  # set while the storage was waited for
                    state = replace(state, ttl_s=self.state.ttl_s)
                self.state = state
        blocks = self.sessions.blocks
        blocks.delete_unused_later(blocks.keys(before) - blocks.keys(state))

    def set_ttl(self, ttl_s: float | None) -> None:
        """Set the time to live, unless `ttl_s` is `None`."""
        if ttl_s is None:
            return
        with self._changing:
            if self.deleted or ttl_s == self.state.ttl_s:
                return
            self.state = replace(self.state, ttl_s=ttl_s)
            if self._is_replaced:  # nobody waits for that, and two saves would overtake each other
                self._ttl_waits = True
            else:
                self._save_ttl()

    def load(self) -> None:
        """Take the state from the storage, if it has another one."""
        found = self.sessions.storage.load(self.session_id, self.version)
        if found is None:
            return
        with self._changing:
            self.state = found.state or self.sessions.empty(self.state.ttl_s)
            self.version = found.version
        self.note(*found.notes)

    def _refresh(self) -> None:
        """Bring the held session up to date: another replica may have changed it, or it was
        idle.
        """
        if not self.saved:
            return
        storage = self.sessions.storage
        if storage.shared:
            self.load()
            if self.sessions.idle_too_long(self.state):
                storage.delete(self.session_id, self.version)
                self.load()
        else:
            if self.sessions.idle_too_long(self.state):
                self._clear()
            self.sessions.sweep()

    def _clear(self) -> None:
        """Delete the turns of the held session, and the blocks that no other history has. If that
        raises, the session is as it was.
        """
        with self._replacing() as before:
            if self.saved:
                self._delete_stored()
            with self._changing:
                self.state = self.sessions.empty(self.state.ttl_s)
        with self._noting:
            self.notes = ()
        blocks = self.sessions.blocks
        # the end of a chat turn clears an unsaved one, and waits for no other session's blocks
        delete = blocks.delete_unused if self.saved else blocks.delete_unused_later
        delete(blocks.keys(before))

    @contextmanager
    def _replacing(self) -> Iterator[SessionState]:
        """The state, which the block saves or deletes in the storage before it replaces it.

        `set_ttl` saves nothing meanwhile: it could save turns again that the storage has deleted.
        """
        with self._changing:
            self._is_replaced = True
            before = self.state
        try:
            yield before
        finally:
            with self._changing:
                self._is_replaced = False
                if self._ttl_waits:
                    self._ttl_waits = False
                    self._save_ttl()

    def _save_ttl(self) -> None:
        """Save a time to live that was set. The caller holds `_changing`; this waits for
        nothing.
        """
        # a server learns it with the next turn, and nothing is kept before the first one
        if self.turns and not self.sessions.storage.shared:
            self._save(self.state)

    def _save(self, state: SessionState, is_over: Callable[[], bool] = lambda: False) -> None:
        self.version, self._write = self.sessions.storage.save(self, state, is_over)

    def _delete_stored(self) -> None:
        """Have the storage keep the session no longer. Raises `SessionUnavailableError`."""
        storage = self.sessions.storage
        self.version = None
        try:
            storage.delete(self.session_id)
        except SessionUnavailableError:
            if not storage.shared:  # the next refresh reads a shared one again
                self._save(self.state)
            raise
