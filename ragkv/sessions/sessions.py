"""All sessions of one engine: opens them by their ids, lists, deletes and clears them. A `Session`
changes itself.

The storage keeps their states (`storage.py`), and `history_blocks.py` their blocks.

The state of an unsaved session is in its `Session` alone. The turn of a conversation that is found
by its messages works on an unsaved one, and `fork` saves it under an id once the turn is answered.
No other process sees an unsaved session, so no other one deletes it. It ends with its process. Its
blocks are then evicted like any unused entry.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ragkv.config import EngineConfig
from ragkv.errors import InputError, SessionUnavailableError
from ragkv.model import Adapter
from ragkv.prompt import PromptReport, Task
from ragkv.prompt.history import SessionState
from ragkv.prompt.template import TemplateRuns
from ragkv.runtime import Closing
from ragkv.store.contents import deleted_everywhere
from ragkv.store.entry import EntryKey

from .history_blocks import HistoryBlocks
from .manifest import Summary
from .session import Session
from .storage import SessionStorage
from .turn import Turn

if TYPE_CHECKING:
    from ragkv.cluster.shared_deletions import SharedDeletions

SWEEP_S = 1.0  # how often idle sessions are looked for at most


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it is listed."""

    session_id: str
    turns: int
    tokens: int  # of its history
    stored_bytes: int  # KV of its history that is stored on this machine
    used_at: float  # seconds since the epoch
    title: str = ""


@dataclass(eq=False)
class Sessions(Closing):
    """The sessions of one engine.

    Methods raise `SessionUnavailableError` if a state cannot be read, or if a storage that replicas
    share does not answer.
    """

    adapter: Adapter
    runs: TemplateRuns  # what the template puts around answers
    config: EngineConfig
    storage: SessionStorage  # where the states are kept
    blocks: HistoryBlocks
    clock: Callable[[], float] = time.time
    # One state is read at a time, so that none is read while its session goes on.
    _loading: threading.Lock = field(default_factory=threading.Lock, init=False)
    # Guards the fields below. No thread waits while it holds this lock.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _live: WeakValueDictionary[str, Session] = field(
        default_factory=WeakValueDictionary, init=False
    )
    _swept_at: float = field(default=0.0, init=False)
    _sweeping: set[str] = field(default_factory=set, init=False)  # ids that wait to be cleared
    # of replicas that share the sessions
    _deletions: "SharedDeletions | None" = field(default=None, init=False)

    # One session

    def open(self, session_id: str, ttl_s: float | None = None) -> Session:
        """The session of that id, new or as it stands. A given `ttl_s` applies from now on."""
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
        session.set_ttl(ttl_s)  # before the refresh, which may find the session expired
        session.bring_up_to_date()
        session.set_ttl(ttl_s)  # again, because the refresh may have read a state with another ttl
        return session

    def _opened(self, session_id: str) -> Session:
        """The one session of that id. Nobody sees it before its state is read: what fails leaves no
        empty session that a turn would save.
        """
        with self._loading:
            session = self.live(session_id)
            if session is None:
                session = Session(self, session_id, self.empty())
                if not self.storage.shared:  # otherwise a refresh reads its state
                    session.load()
                with self._lock:
                    self._live[session_id] = session
        return session

    def unsaved(
        self, session_id: str, past: Session | None = None, notes: Sequence[str] = ()
    ) -> Session:
        """A session that is saved nowhere until it is forked, with the past of another one or with
        none.

        `session_id` is the group of its blocks; `notes` are for the report of its first turn.
        """
        copied = nullcontext(self.empty()) if past is None else self.blocks.copied(past)
        with copied as state:
            session = Session(self, session_id, state, tuple(notes), saved=False)
            self.blocks.keep(session)
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

    @contextmanager
    def turn(self, session: Session, task: Task, report: PromptReport) -> Iterator[Turn]:
        """A turn of `session`, which the caller holds, from its prompt's KV on. One that does not
        end leaves the session as it was.
        """
        with Turn(session, task, report) as turn, self.blocks.used_by(turn):
            turn.begin()
            yield turn

    def live(self, session_id: str) -> Session | None:
        """The session of that id, if somebody holds it."""
        with self._lock:
            return self._live.get(session_id)

    def empty(self, ttl_s: float | None = None) -> SessionState:
        """The state of a session without turns."""
        now = self.clock()
        return SessionState(created_at=now, used_at=now, ttl_s=ttl_s)

    def idle_too_long(self, known: SessionState | Summary) -> bool:
        """Whether a session was not used for longer than it lives."""
        ttl_s = self.config.session.ttl_s if known.ttl_s is None else known.ttl_s
        return bool(known.turns) and ttl_s is not None and self.clock() - known.used_at > ttl_s

    # Lists

    def list(self, session_ids: Iterable[str] | None = None) -> tuple[SessionInfo, ...]:
        """Every session that has turns, the last used first; with `session_ids`, of these only."""
        found = self._last_used_first(None if session_ids is None else tuple(session_ids))
        return tuple(self._info(one) for one in found if not self.idle_too_long(one))

    def ids(self, *, idle: bool = False) -> tuple[str, ...]:
        """The ids of the sessions that have turns, the last used first. No state is read. With
        `idle` also those that were idle for too long, and are not cleared yet.
        """
        found = self._last_used_first()
        return tuple(one.session_id for one in found if idle or not self.idle_too_long(one))

    def has(self, session_id: str) -> bool:
        """Whether there is a session of that id that has turns, or has its first one under way in
        this process: quick.
        """
        session = self.live(session_id)
        if session is not None and session.lock.held:
            return True
        return not all(map(self.idle_too_long, self._last_used_first([session_id])))

    def _last_used_first(self, session_ids: Sequence[str] | None = None) -> Sequence[Summary]:
        found = (one for one in self.storage.summaries(session_ids) if one.turns)
        return sorted(found, key=lambda summary: -summary.used_at)

    def _info(self, summary: Summary) -> SessionInfo:
        sizes = zip(summary.keys, summary.key_tokens, strict=True)
        stored = sum(tokens for key, tokens in sizes if self.blocks.writer.stored(key))
        size = stored * self.adapter.kv_bytes_per_token
        return SessionInfo(
            summary.session_id, summary.turns, summary.tokens, size, summary.used_at, summary.title
        )

    # Deletions

    def delete_all(self, session_ids: Iterable[str]) -> None:
        """Delete sessions: those that replicas share also while a turn of theirs runs. One that
        cannot be deleted keeps no other, and raises `SessionUnavailableError` at the end.
        """
        left = [one for one in session_ids if self.storage.shared or not self._delete(one)]
        keys = {key for summary in self.storage.summaries(left) for key in summary.keys}
        try:
            deleted_everywhere(left, self._delete_stored)
        finally:
            self.blocks.delete_unused(keys)  # but for those that are in a session still

    def _delete(self, session_id: str) -> bool:
        """Delete a session after its turn; `False` if its state cannot be read."""
        try:
            self.open(session_id).delete()
        except SessionUnavailableError:  # a deletion need not read what it deletes
            return False
        return True

    def _delete_stored(self, session_id: str) -> bool:
        self.storage.delete(session_id)
        self.forget(session_id)
        return True

    def forget(self, session_id: str) -> None:
        """The session of that id was deleted: who holds it learns it."""
        with self._lock:
            session = self._live.pop(session_id, None)
        if session is not None:
            session.deleted = True

    def in_background(self, action: Callable[[], object]) -> bool:
        """Run `action` on the thread that saves blocks, once the blocks so far are saved.

        `False` if it will not run: the engine is being closed, or the system has no thread to give.
        """
        return self.blocks.writer.then(action)

    def sweep(self) -> None:
        """Have the sessions cleared that were idle for too long, except those of which a turn
        runs.
        """
        now = self.clock()
        with self._lock:
            if abs(now - self._swept_at) < SWEEP_S:  # a clock may be set back
                return
            self._swept_at = now
        idle = {one.session_id for one in self.storage.summaries() if self.idle_too_long(one)}
        with self._lock:
            new = idle - self._sweeping
            self._sweeping |= new
        for session_id in new:
            if not self.in_background(partial(self._clear_idle, session_id)):
                with self._lock:  # its thread could not begin: the next sweep tries again
                    self._sweeping.discard(session_id)

    def _clear_idle(self, session_id: str) -> None:
        try:
            with suppress(SessionUnavailableError):  # the next sweep tries again
                self.open(session_id)  # opening an expired session clears it
        finally:
            with self._lock:
                self._sweeping.discard(session_id)

    def tidy(self) -> None:
        """Delete what nobody needs any more: idle sessions, and blocks that are in none."""
        self.sweep()
        self.blocks.delete_orphans()

    # With other processes

    def begin(self, folder: Path | None = None) -> None:
        """Delete what earlier processes left that is too old or in no session. Replicas that share
        sessions do that again and again; a file in `folder` has what others were not told of yet.
        """
        if self.storage.shared:
            # Imported by name: that package is above this one, and a single machine never needs it.
            follow = resolve_name("ragkv.cluster:SharedDeletions")
            self._deletions = follow(self.storage, folder, self.blocks.delete_unused, self.tidy)
        else:
            self.sweep()
            self.blocks.writer.flush()
            self.blocks.writer.then(self.blocks.delete_orphans)

    def announcing(self, keys: Sequence[EntryKey]) -> AbstractContextManager[None]:
        """The block deletes the entries of `keys`; the replicas that share the sessions are told of
        it.
        """
        return nullcontext() if self._deletions is None else self._deletions.announcing(keys)

    def flush(self) -> None:
        """Return when blocks and states are saved."""
        self.blocks.writer.flush()
        self.storage.flush()

    def close(self) -> None:
        """Save what waits and stop."""
        with ExitStack() as used:  # the last one first
            used.callback(self.storage.close)
            used.callback(self.blocks.writer.close)
            if self._deletions is not None:
                used.callback(self._deletions.close)
