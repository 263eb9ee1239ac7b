"""The conversations of one engine: which there are, their turns, and which blocks their histories
have.

Where their states are kept is the storage's business (`storage.py`, `redis_storage.py`). A
conversation that is not saved has its state in its `Session` alone: the turn of a conversation that
is found by its messages works on one, and `fork` saves it under an id once the turn is answered. No
other process can see it, so none can delete it during its turn. It ends with its process; its
blocks are then evicted like any entry that is not used.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

import torch

from ragkv.config import EngineConfig
from ragkv.errors import InputError, SessionUnavailableError
from ragkv.model import Adapter
from ragkv.prompt import ServedPrompt, Task
from ragkv.prompt.history import Block, BlockWriter, SessionState
from ragkv.prompt.template import TemplateRuns
from ragkv.store import EntryKey

from .manifest import Summary
from .session import Session
from .storage import FolderStorage, SessionStorage
from .turn import Turn
from .upkeep import ConversationUpkeep

if TYPE_CHECKING:
    from ragkv.cluster.shared_deletions import SharedDeletions

SWEEP_S = 1.0  # how often idle conversations are looked for at most
# The number of conversations whose last use is known here at most.
REMEMBERED = 10_000
CLOCK_SKEW_S = 5.0  # by how much the clocks of replicas may differ


@dataclass(eq=False)
class Conversations(ConversationUpkeep):
    """The conversations of one engine. All methods are thread-safe.

    Methods raise `SessionUnavailableError` if a state cannot be read, or if a storage that replicas
    share does not answer.
    """

    adapter: Adapter
    runs: TemplateRuns  # what the template puts around answers
    block_writer: BlockWriter
    config: EngineConfig
    clock: Callable[[], float] = time.time
    _storage: SessionStorage | None = field(default=None, init=False)
    _deletions: "SharedDeletions | None" = field(default=None, init=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, init=False)
    # One state is read at a time, so that none is read while its conversation goes on.
    _loading: threading.Lock = field(default_factory=threading.Lock, init=False)
    # Guards the fields below. No thread waits for a session, a disk or a server while it holds this
    # lock.
    _lock: threading.Condition = field(default_factory=threading.Condition, init=False)
    _live: WeakValueDictionary[str, Session] = field(
        default_factory=WeakValueDictionary, init=False
    )
    _unsaved: WeakSet[Session] = field(default_factory=WeakSet, init=False)
    # when the states seen here were used, by id, to notice older ones
    _seen_at: dict[str, float] = field(default_factory=dict, init=False)
    _turns: set[Turn] = field(default_factory=set, init=False)  # under way
    # the keys of histories that become those of other conversations now
    _copying: list[set[EntryKey]] = field(default_factory=list, init=False)
    # the blocks that are just being deleted; more than once, by several threads
    _dropping: Counter[EntryKey] = field(default_factory=Counter, init=False)
    _swept_at: float = field(default=0.0, init=False)

    @property
    def storage(self) -> SessionStorage:
        """Where the states are kept; opened with the first use."""
        if self._storage is None:
            with self._opening:
                if self._storage is None:
                    self._open()
        assert self._storage is not None
        return self._storage

    def begin(self) -> None:
        """Open the storage now, and delete what earlier processes left that is too old or in no
        conversation. Replicas that share conversations do that again and again.
        """
        if not self.storage.shared:
            self.sweep()
            self.block_writer.flush()
            self.block_writer.then(self.drop_orphans)

    def _open(self) -> None:
        """On the store's Redis server if conversations are shared, else in its folder, if the store
        may write it. Needs `_opening`.
        """
        store = self.config.store
        own = self.config.session.directory or (None if store.read_only else store.directory)
        folder = None if own is None else Path(own)
        base = self.block_writer.base
        if not self.config.session.shared:
            self._storage = FolderStorage(folder, base)
            return
        assert store.redis is not None  # `EngineConfig` refuses shared sessions without a server
        # By name: that room is above this one, and nobody with one machine imports it.
        open_storage = resolve_name("ragkv.cluster:open_storage")
        shared = open_storage(store.redis, base, self.adapter.vocabulary)
        # before others see the storage, and delete what replicas are to be told of
        self._deletions = shared.follow(folder, self.drop, self.tidy)
        self._storage = shared

    # One conversation.

    def session(self, session_id: str, ttl_s: float | None = None) -> Session:
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
                if not self.storage.shared:  # otherwise `refresh` reads its state
                    self._load(session)
                with self._lock:
                    self._live[session_id] = session
        return session

    def check_usable(self, session: Session) -> None:
        """Raise `InputError` if `session` was deleted, or is another engine's, which has its blocks
        and its manifest.
        """
        session.check_exists()
        if session.owner is not self:
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
        with self._lock:  # so that no block of the past is deleted in between
            state = self._empty() if past is None else past.state
            session = Session(self, session_id, state, tuple(notes), saved=False)
            self._unsaved.add(session)
        return session

    @contextmanager
    def turn(self, session: Session, task: Task, served: ServedPrompt) -> Iterator[Turn]:
        """A turn of `session`, which the caller holds, from its prompt's KV on. One that does not
        end leaves the session as it was.
        """
        with Turn(self, session, task, served) as turn:
            with self._lock:
                self._turns.add(turn)
            try:
                turn.begin()
                yield turn
            finally:
                with self._lock:
                    self._turns.discard(turn)

    # What a session and its turns need. The caller holds the session.

    def refresh(self, session: Session) -> None:
        """Bring the session up to date before it is used: another replica may have changed it, or
        it was idle.
        """
        if not session.saved:
            return
        if self.storage.shared:
            self._load(session)
            if self._idle_too_long(session.state):
                self.storage.delete(session.session_id, session.version)
                self._load(session)
        else:
            if self._idle_too_long(session.state):
                self.clear(session)
            self.sweep()

    def commit(self, session: Session, change: Callable[[SessionState], SessionState]) -> None:
        """Change the session's state, save it, and delete the blocks that no history has any more.

        If it raises, the session's state is unchanged.
        """
        # In one step with what `_set_ttl` saves; but nothing waits for a server under the lock.
        with nullcontext() if self.storage.shared else self._lock:
            before = session.state
            state = replace(change(before), used_at=self.clock())
            if session.saved:
                self.storage.save(session, state)
            with self._lock:
                if session.state.ttl_s != before.ttl_s:  # set while the server was waited for
                    state = replace(state, ttl_s=session.state.ttl_s)
                session.state = state
        self._saw(session)
        if unused := self._keys(before) - self._keys(state):
            self.block_writer.then(partial(self.drop, unused))

    def save(self, block: Block, kv: torch.Tensor, group: str, wait_s: float) -> bool:
        """See `BlockWriter.save`. A block that is just being deleted is stored after that."""
        until = time.monotonic() + wait_s
        key = self.block_writer.key(block)
        with self._lock:
            if not self._lock.wait_for(lambda: key not in self._dropping, wait_s):
                return False
        return self.block_writer.save(block, kv, group, max(0.0, until - time.monotonic()))

    def wait_saved(self, session: Session, timeout_s: float) -> str | None:
        """Return when the session's last state survives a crash; a note if that is not so within
        `timeout_s`.
        """
        return self.storage.wait_saved(session, timeout_s)

    def clear(self, session: Session) -> None:
        """Delete the session's turns, and the blocks that no other history has."""
        before = session.state
        if session.saved and self.storage.shared:
            self.storage.delete(session.session_id)
        with self._lock:
            session.state = self._empty(session.state.ttl_s)
            session.version = None
            session.notes = ()
            self._seen_at.pop(session.session_id, None)
        # now, because a write that waits is not done any more
        if session.saved and not self.storage.shared:
            self.storage.delete(session.session_id)
        self.drop(self._keys(before))

    def sweep(self) -> None:
        """Have the conversations cleared that were idle for too long, except those of which a turn
        runs.
        """
        now = self.clock()
        with self._lock:
            if abs(now - self._swept_at) < SWEEP_S:  # a clock may be set back
                return
            self._swept_at = now
        for summary in filter(self._idle_too_long, self.storage.summaries()):
            self.block_writer.then(partial(self._clear_idle, summary.session_id))

    def _clear_idle(self, session_id: str) -> None:
        with suppress(SessionUnavailableError):  # the next sweep tries again
            self.session(session_id)  # opening an expired session clears it

    def _load(self, session: Session) -> None:
        """Take the session's state from the storage, if it has another one."""
        found = self.storage.load(session.session_id, session.version)
        if found is None:
            return
        state = self._empty(session.state.ttl_s) if found.state is None else found.state
        with self._lock:
            session.state = state
            session.version = found.version
            session.notes = found.notes
            if (
                state.turns
                and state.used_at < self._seen_at.get(session.session_id, 0.0) - CLOCK_SKEW_S
            ):
                session.notes += (
                    "the conversation is older than it was here: its server was restored",
                )
        self._saw(session)

    def _keys(self, state: SessionState) -> set[EntryKey]:
        return set(map(self.block_writer.key, state.history.blocks))

    def _saw(self, session: Session) -> None:
        """Remember when the session's state was used; of a server alone, which may be restored."""
        if self.storage.shared and session.saved:
            with self._lock:
                if len(self._seen_at) >= REMEMBERED:
                    self._seen_at.clear()
                self._seen_at[session.session_id] = session.state.used_at

    def _set_ttl(self, session: Session, ttl_s: float | None) -> None:
        """Set a session's time to live, unless `ttl_s` is `None`. Needs `_lock`."""
        if ttl_s in (None, session.state.ttl_s):
            return
        session.state = replace(session.state, ttl_s=ttl_s)
        if not self.storage.shared:  # the server learns it with the next turn
            self.storage.save(session, session.state)

    def _empty(self, ttl_s: float | None = None) -> SessionState:
        now = self.clock()
        return SessionState(created_at=now, used_at=now, ttl_s=ttl_s)

    def _idle_too_long(self, known: SessionState | Summary) -> bool:
        ttl_s = self.config.session.ttl_s if known.ttl_s is None else known.ttl_s
        return bool(known.turns) and ttl_s is not None and self.clock() - known.used_at > ttl_s
