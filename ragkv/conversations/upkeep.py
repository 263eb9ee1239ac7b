"""What concerns all conversations of an engine: lists of them, copies, deletions, and what is left
over. A turn needs none of this.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from ragkv.errors import InputError, SessionUnavailableError
from ragkv.model import Adapter
from ragkv.prompt.history import BlockWriter, SessionState
from ragkv.store import EntryKey, RemoteStats

from .manifest import Summary
from .session import Session, SessionInfo
from .storage import SessionStorage
from .turn import Turn

if TYPE_CHECKING:
    from ragkv.cluster.shared_deletions import SharedDeletions

log = logging.getLogger(__name__)


class ConversationUpkeep(ABC):
    """The part of `Conversations` that no turn needs. All methods are thread-safe."""

    adapter: Adapter
    block_writer: BlockWriter
    clock: Callable[[], float]
    _storage: SessionStorage | None  # opened with the first use
    _lock: threading.Condition
    _live: WeakValueDictionary[str, Session]
    _unsaved: WeakSet[Session]
    _turns: set[Turn]  # under way
    _copying: list[set[EntryKey]]
    _dropping: Counter[EntryKey]
    _deletions: "SharedDeletions | None"

    @property
    @abstractmethod
    def storage(self) -> SessionStorage:
        """See `Conversations.storage`."""

    @abstractmethod
    def session(self, session_id: str, ttl_s: float | None = None) -> Session:
        """See `Conversations.session`."""

    @abstractmethod
    def commit(self, session: Session, change: Callable[[SessionState], SessionState]) -> None:
        """See `Conversations.commit`."""

    @abstractmethod
    def clear(self, session: Session) -> None:
        """See `Conversations.clear`."""

    @abstractmethod
    def sweep(self) -> None:
        """See `Conversations.sweep`."""

    @abstractmethod
    def _keys(self, state: SessionState) -> set[EntryKey]:
        """See `Conversations._keys`."""

    @abstractmethod
    def _idle_too_long(self, known: SessionState | Summary) -> bool:
        """See `Conversations._idle_too_long`."""

    def list(self, session_ids: Iterable[str] | None = None) -> tuple[SessionInfo, ...]:
        """Every conversation that has turns, the last used first; with `session_ids`, of these
        only.
        """
        found = self.storage.summaries(None if session_ids is None else tuple(session_ids))
        shown = (
            one for one in _last_used_first(found) if one.turns and not self._idle_too_long(one)
        )
        return tuple(map(self._info, shown))

    def has(self, session_id: str) -> bool:
        """Whether there is a conversation of that id that has turns, or has its first one under way
        in this process: quick.
        """
        with self._lock:
            session = self._live.get(session_id)
        if session is not None and session.lock.locked():
            return True
        return any(summary.turns for summary in self.storage.summaries([session_id]))

    def ids(self) -> tuple[str, ...]:
        """The ids of the conversations that have turns, in no order, without looking anything up:
        quick.
        """
        return self.storage.ids()

    def uses(self) -> dict[str, float]:
        """When each conversation was used last (seconds since the epoch), by its id, the last used
        first: quick.
        """
        return {
            summary.session_id: summary.used_at
            for summary in _last_used_first(self.storage.summaries())
        }

    def delete_all(self, session_ids: Iterable[str]) -> None:
        """Delete conversations: those that replicas share also while a turn of theirs runs."""
        if not self.storage.shared:
            for session_id in session_ids:
                try:
                    self.session(session_id).delete()
                except SessionUnavailableError:  # a deletion need not read what it deletes
                    self._delete_unread([session_id])
            return
        self._delete_unread(tuple(session_ids))

    def _delete_unread(self, session_ids: Sequence[str]) -> None:
        found = tuple(self.storage.summaries(session_ids))
        for session_id in session_ids:
            self.storage.delete(session_id)
            with self._lock:
                session = self._live.pop(session_id, None)
            if session is not None:
                session.deleted = True
        self.drop({key for summary in found for key in summary.keys})

    def fork(self, session: Session, session_id: str) -> Session:
        """A conversation of that id with the same past, without a turn that is under way."""
        with self._copied(session) as past:
            other = self.session(session_id)
            if other is session:
                raise InputError(
                    f"{session_id!r} is the id of the conversation to be forked itself: choose "
                    "another."
                )
            with other.held():
                if other.turns:
                    raise InputError(
                        f"There is a conversation {session_id!r} already: choose another id, or "
                        "delete it."
                    )
                self.commit(other, lambda _: replace(past, created_at=self.clock()))
        return other

    @contextmanager
    def _copied(self, session: Session) -> Iterator[SessionState]:
        """The session's state, none of whose blocks is deleted before another session has it."""
        with self._lock:
            past = session.state
            keys = self._keys(past)
            self._copying.append(keys)
        try:
            yield past
        finally:
            with self._lock:
                self._copying.remove(keys)

    def delete(self, session: Session) -> None:
        """Clear a session for good."""
        self.clear(session)
        with self._lock:
            session.deleted = True
            if session.saved:
                self._live.pop(session.session_id, None)

    def server_stats(self) -> RemoteStats | None:
        """The health of the server that replicas share, as conversations see it; `None` if they
        share none.
        """
        return None if self._storage is None else self._storage.stats()

    def telling(self, keys: Sequence[EntryKey]) -> AbstractContextManager[None]:
        """The block deletes the entries of `keys`; the replicas that share the conversations are
        told of it.
        """
        return nullcontext() if self._deletions is None else self._deletions.telling(keys)

    def drop(self, keys: Iterable[EntryKey]) -> None:
        """Delete the blocks of these keys that are in no history, of any replica, and of no turn
        under way.
        """
        if not (dropped := set(keys)):
            return
        # Noted before it is asked what is used: a turn that needs one of them saves it afterwards.
        # What is saved while the writer's own thread drops is stored afterwards anyway.
        noted = set() if self.block_writer.worker.is_current else dropped
        with self._lock:
            self._dropping.update(noted)
        try:
            for key in dropped - self._used_keys():
                self.block_writer.delete(key)
        except SessionUnavailableError as error:
            log.warning("Blocks of a conversation were not deleted: %s", error)
        finally:
            with self._lock:
                self._dropping -= Counter(noted)
                self._lock.notify_all()

    def drop_orphans(self) -> int:
        """Have the blocks on this machine deleted that are in no conversation; returns how many
        there are.

        The block writer deletes them after what was saved before. A process that was killed in a
        turn leaves such blocks, and so does a deletion that this one was not told of.
        """
        if not self.storage.lists_all:
            return 0
        blocks = self.block_writer.on_this_machine()
        if blocks:
            blocks -= self._used_keys()
        if blocks:  # some may be of another model's conversations
            blocks &= self.block_writer.own()
            # Not at once: a turn that begins now may save the same blocks, and the block writer
            # stores them afterwards.
            if not self.block_writer.then(partial(self.drop, blocks)):
                self.drop(blocks)  # the engine is being closed: no turn begins
        return len(blocks)

    def tidy(self) -> None:
        """Delete what no replica needs any more: idle conversations, and blocks that are
        in none.
        """
        self.sweep()
        self.drop_orphans()

    def flush(self) -> None:
        """Return when blocks and states are saved."""
        self.block_writer.flush()
        if self._storage is not None:
            self._storage.flush()

    def close(self) -> None:
        """Save what waits and stop. Twice is harmless."""
        if self._deletions is not None:
            self._deletions.close()
        self.block_writer.close()
        if self._storage is not None:
            self._storage.close()

    def _used_keys(self) -> set[EntryKey]:
        """The keys of the blocks that turns under way or histories have, of any replica."""
        # In this order: a block belongs to a turn until its conversation is committed.
        with self._lock:
            used = {key for turn in self._turns for key in turn.saved_keys}.union(*self._copying)
            unsaved = tuple(self._unsaved)
        used.update(*(self._keys(session.state) for session in unsaved))
        return used.union(*(summary.keys for summary in self.storage.summaries()))

    def _info(self, summary: Summary) -> SessionInfo:
        sizes = zip(summary.keys, summary.key_tokens, strict=True)
        stored = sum(tokens for key, tokens in sizes if self.block_writer.stored(key))
        size = stored * self.adapter.kv_bytes_per_token
        return SessionInfo(
            summary.session_id, summary.turns, summary.tokens, size, summary.used_at, summary.title
        )


def _last_used_first(found: Iterable[Summary]) -> list[Summary]:
    return sorted(found, key=lambda summary: -summary.used_at)
