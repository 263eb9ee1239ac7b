"""The sessions of one engine: opens them by their ids, changes them by turns, and clears them.

The storage keeps their states (`storage.py`), and `history_blocks.py` their blocks.

The state of an unsaved conversation is in its `Session` alone. The turn of a conversation that is
found by its messages works on an unsaved one, and `fork` saves it under an id once the turn is
answered. No other process sees an unsaved conversation, so no other one deletes it.
The conversation ends with its process. Its blocks are then evicted like any unused entry.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakValueDictionary

from ragkv.config import EngineConfig
from ragkv.errors import InputError, SessionUnavailableError
from ragkv.model import Adapter
from ragkv.prompt import PromptReport, Task
from ragkv.prompt.history import SessionState
from ragkv.prompt.template import TemplateRuns

from .folder_storage import LazyStorage
from .history_blocks import HistoryBlocks
from .manifest import Summary
from .session import Session
from .turn import Turn

SWEEP_S = 1.0  # how often idle conversations are looked for at most


@dataclass(eq=False)
class Sessions:
    """The conversations of one engine, one by one. All methods are thread-safe.

    Methods raise `SessionUnavailableError` if a state cannot be read, or if a storage that replicas
    share does not answer.
    """

    adapter: Adapter
    runs: TemplateRuns  # what the template puts around answers
    config: EngineConfig
    storage: LazyStorage  # where the states are kept
    blocks: HistoryBlocks
    clock: Callable[[], float] = time.time
    # One state is read at a time, so that none is read while its conversation goes on.
    _loading: threading.Lock = field(default_factory=threading.Lock, init=False)
    # Guards the states and the fields below. No thread waits for a session, a disk or a server while
    # it holds this lock.
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)
    _live: WeakValueDictionary[str, Session] = field(
        default_factory=WeakValueDictionary, init=False
    )
    _swept_at: float = field(default=0.0, init=False)
    _sweeping: set[str] = field(default_factory=set, init=False)  # ids that wait to be cleared

    def open(self, session_id: str, ttl_s: float | None = None) -> Session:
        """The conversation of that id, new or as it stands. A given `ttl_s` applies from now on."""
        if not isinstance(session_id, str) or not session_id:
            raise InputError(
                f"A session's id must be a string that is not empty, not {session_id!r:.80}."
            )
        try:
            session_id.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"The session's id {session_id!r:.80} has half a character in it."
            ) from error
        if ttl_s is not None and not ttl_s > 0:
            raise InputError(f"ttl_s is {ttl_s}; it must be more than 0.")
        session = self._opened(session_id)
        with self._lock:
            self._set_ttl(session, ttl_s)  # before the refresh, which may find the session expired
        self.bring_up_to_date(session)
        with self._lock:
            # again, because the refresh may have read a state with another ttl
            self._set_ttl(session, ttl_s)
        return session

    def _opened(self, session_id: str) -> Session:
        """The one session of that id. Nobody sees it before its state is read: what fails leaves no
        empty conversation that a turn would save.
        """
        with self._loading:
            with self._lock:
                session = self._live.get(session_id)
            if session is None:
                session = Session(self, session_id, self._empty())
                if not self.storage().shared:  # otherwise `refresh` reads its state
                    self._load(session)
                with self._lock:
                    self._live[session_id] = session
        return session

    def check_usable(self, session: Session) -> None:
        """Raise `InputError` if `session` was deleted, or is another engine's, which has its blocks
        and its manifest.
        """
        session.check_exists()
        if session.sessions is not self:
            raise InputError(
                f"Session {session.session_id!r} is another engine's: ask that engine, or get one "
                "of this engine with its `session`."
            )

    def bring_up_to_date(self, session: Session) -> None:
        """Refresh a session that is only read. If a turn of it runs, the next one refreshes
        it.
        """
        if session.lock.acquire(blocking=False):
            try:
                self.refresh(session)
            finally:
                session.lock.release()

    def unsaved(
        self, session_id: str, past: Session | None = None, notes: Sequence[str] = ()
    ) -> Session:
        """A conversation that is saved nowhere until it is forked, with the past of another one or
        with none.

        `session_id` is the group of its blocks; `notes` are for the report of its first turn.
        """
        copied = nullcontext(self._empty()) if past is None else self.blocks.copied(past)
        with copied as state:
            session = Session(self, session_id, state, tuple(notes), saved=False)
            self.blocks.keep(session)
        return session

    @contextmanager
    def turn(self, session: Session, task: Task, report: PromptReport) -> Iterator[Turn]:
        """A turn of `session`, which the caller holds, from its prompt's KV on. One that does not
        end leaves the session as it was.
        """
        with Turn(session, task, report) as turn, self.blocks.used_by(turn):
            turn.begin()
            yield turn

    # What a session and its turns need. The caller holds the session.

    def refresh(self, session: Session) -> None:
        """Bring the session up to date before it is used: another replica may have changed it, or
        it was idle.
        """
        if not session.saved:
            return
        if self.storage().shared:
            self._load(session)
            if self.idle_too_long(session.state):
                self.storage().delete(session.session_id, session.version)
                self._load(session)
        else:
            if self.idle_too_long(session.state):
                self.clear(session)
            self.sweep()

    def commit(self, session: Session, change: Callable[[SessionState], SessionState]) -> None:
        """Change the session's state, save it, and delete the blocks that no history has any more.

        If it raises, the session's state is unchanged.
        """
        # `_set_ttl` saves under the lock, too. A server is not waited for under it.
        with nullcontext() if self.storage().shared else self._lock:
            before = session.state
            state = replace(change(before), used_at=self.clock())
            if session.saved:
                self.storage().save(session, state)
            with self._lock:
                if session.state.ttl_s != before.ttl_s:  # set while the server was waited for
                    state = replace(state, ttl_s=session.state.ttl_s)
                session.state = state
        if unused := self.blocks.keys(before) - self.blocks.keys(state):
            self.blocks.writer.then(partial(self.blocks.drop, unused))

    def clear(self, session: Session) -> None:
        """Delete the session's turns, and the blocks that no other history has."""
        before = session.state
        if session.saved and self.storage().shared:
            self.storage().delete(session.session_id)
        with self._lock:
            session.state = self._empty(session.state.ttl_s)
            session.version = None
            session.notes = ()
        # now, because a write that waits is not done any more
        if session.saved and not self.storage().shared:
            self.storage().delete(session.session_id)
        self.blocks.drop(self.blocks.keys(before))

    def delete(self, session: Session) -> None:
        """Clear a session for good."""
        self.clear(session)
        session.deleted = True
        if session.saved:
            self.forget(session.session_id)

    def forget(self, session_id: str) -> None:
        """The conversation of that id was deleted: who holds its session learns it."""
        with self._lock:
            session = self._live.pop(session_id, None)
        if session is not None:
            session.deleted = True

    def live(self, session_id: str) -> Session | None:
        """The session of that id, if somebody holds it."""
        with self._lock:
            return self._live.get(session_id)

    def sweep(self) -> None:
        """Have the conversations cleared that were idle for too long, except those of which a turn
        runs.
        """
        now = self.clock()
        with self._lock:
            if abs(now - self._swept_at) < SWEEP_S:  # a clock may be set back
                return
            self._swept_at = now
        idle = {one.session_id for one in self.storage().summaries() if self.idle_too_long(one)}
        with self._lock:
            new = idle - self._sweeping
            self._sweeping |= new
        for session_id in new:
            self.blocks.writer.then(partial(self._clear_idle, session_id))

    def _clear_idle(self, session_id: str) -> None:
        try:
            with suppress(SessionUnavailableError):  # the next sweep tries again
                self.open(session_id)  # opening an expired session clears it
        finally:
            with self._lock:
                self._sweeping.discard(session_id)

    def _load(self, session: Session) -> None:
        """Take the session's state from the storage, if it has another one."""
        found = self.storage().load(session.session_id, session.version)
        if found is None:
            return
        state = self._empty(session.state.ttl_s) if found.state is None else found.state
        with self._lock:
            session.state = state
            session.version = found.version
            session.notes = found.notes

    def _set_ttl(self, session: Session, ttl_s: float | None) -> None:
        """Set a session's time to live, unless `ttl_s` is `None`. Needs `_lock`."""
        if ttl_s in (None, session.state.ttl_s):
            return
        session.state = replace(session.state, ttl_s=ttl_s)
        if not self.storage().shared:  # the server learns it with the next turn
            self.storage().save(session, session.state)

    def _empty(self, ttl_s: float | None = None) -> SessionState:
        now = self.clock()
        return SessionState(created_at=now, used_at=now, ttl_s=ttl_s)

    def idle_too_long(self, known: SessionState | Summary) -> bool:
        """Whether a conversation was not used for longer than it lives."""
        ttl_s = self.config.session.ttl_s if known.ttl_s is None else known.ttl_s
        return bool(known.turns) and ttl_s is not None and self.clock() - known.used_at > ttl_s
