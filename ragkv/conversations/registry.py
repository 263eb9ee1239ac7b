"""The conversations of one engine: which sessions there are, and which blocks their histories have.

`LocalSessions` (`local.py`) and `SharedSessions` (`shared.py`) implement where the state of a conversation is saved.
"""

import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar
from weakref import WeakValueDictionary

from ragkv.config import SessionConfig
from ragkv.errors import InputError
from ragkv.model.layout import TemplateRuns
from ragkv.prompt import Prefiller
from ragkv.prompt.history import BlockWriter, Conversation, Discard, find
from ragkv.scheduling import Ticket
from ragkv.store import EntryKey, RemoteStats

from .manifest import Summary
from .repair import Repair, RepairTurn
from .session import Session, SessionInfo, SessionOwner
from .turn import DetachedTurn, SessionTurn
from .unsaved import UnsavedSessions

T = TypeVar("T", bound=SessionTurn)


class Sessions(SessionOwner):
    """The conversations of one engine. All methods are thread-safe."""

    def __init__(
        self,
        prefiller: Prefiller,
        runs: TemplateRuns,
        block_writer: BlockWriter,
        settings: SessionConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.adapter, self.runs, self.block_writer = prefiller.adapter, runs, block_writer
        self.settings, self.clock = settings, clock
        # Guards the fields below. No thread waits for a session or writes a manifest while it holds this lock.
        self._lock = threading.RLock()
        self._live: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._known: dict[str, Summary] = {}  # every conversation, by its id
        self._references: Counter[EntryKey] = Counter()  # how many histories have a block, by the block's key
        self._unsaved_keys: dict[str, tuple[EntryKey, ...]] = {}  # of the blocks of each unsaved session, by its id
        self._turns: set[SessionTurn] = set()  # under way
        self.request_numbers = count(1)
        self.unsaved = UnsavedSessions(self, self._set_unsaved_keys)
        self._repair = Repair(
            prefiller,
            runs.before_documents,
            block_writer.base.codec,
            lambda session, ticket: self._turn_of(session, ticket, RepairTurn),
        )

    @abstractmethod
    def summaries(self) -> Iterable[Summary]:
        """The summaries of all conversations."""

    @abstractmethod
    def known(self, session_ids: Iterable[str]) -> Iterable[Summary]:
        """The summaries of the conversations of these ids, without those that do not exist."""

    @abstractmethod
    def _open(self, session_id: str) -> Session:
        """A session object for that id. The caller holds `_lock`."""

    def session(self, session_id: str, ttl_s: float | None = None, discard: str | Discard | None = None) -> Session:
        """The conversation of that id, new or as it stands. A given `ttl_s` or `discard` applies from now on."""
        if not isinstance(session_id, str) or not session_id:
            raise InputError(f"A session's id must be a string that is not empty, not {session_id!r:.80}.")
        if ttl_s is not None and not ttl_s > 0:
            raise InputError(f"ttl_s is {ttl_s}; it must be more than 0.")
        if discard is not None:
            find(discard)
        with self._lock:
            session = self._live.get(session_id)
            if session is None:
                session = self._live[session_id] = self._open(session_id)
            if discard is not None:
                session.discard_by = discard
            self._set_ttl(session, ttl_s)  # before the refresh, which may find the session expired
        if session.lock.acquire(blocking=False):  # otherwise a turn runs, and the next one refreshes the session
            try:
                self.refresh(session)
            finally:
                session.lock.release()
        with self._lock:
            self._set_ttl(session, ttl_s)  # again, because the refresh may have read a state with another ttl
        return session

    @contextmanager
    def turn(self, session: Session | None, ticket: Ticket | None = None) -> Iterator[DetachedTurn]:
        """A turn of `session`, or of none. A turn that does not end leaves the session as it was."""
        if session is None:
            yield DetachedTurn()
            return
        with self._turn_of(session, ticket, SessionTurn) as turn:
            yield turn
        self._repair_later(session)

    @contextmanager
    def _turn_of(self, session: Session, ticket: Ticket | None, kind: type[T]) -> Iterator[T]:
        with session.held(ticket), kind(session.owner, session) as turn:
            with self._lock:
                self._turns.add(turn)
            try:
                yield turn
            finally:
                with self._lock:
                    self._turns.discard(turn)

    def _repair_later(self, session: Session) -> None:
        """Have the session's history made exact between turns, if the settings say so."""
        if self.settings.inexact_history == "background" and session.owner is self:
            self._repair.add(session)

    def fork(self, session: Session, session_id: str) -> Session:
        past, other = session.conversation, self.session(session_id, discard=session.discard_by)
        if other is session:
            raise InputError(f"{session_id!r} is the id of the conversation to be forked itself: choose another.")
        with other.held():
            if other.turns:
                raise InputError(f"There is a conversation {session_id!r} already: choose another id, or delete it.")
            self.commit(other, replace(past, created_at=self.clock()))
        self._repair_later(other)
        return other

    def delete(self, session: Session) -> None:
        self.clear(session)
        with self._lock:
            session.deleted = True
            self._live.pop(session.session_id, None)

    def drop(self, keys: Iterable[EntryKey]) -> None:
        for key in keys:
            with self._lock:
                if self._references[key] > 0 or any(key in turn.saved_keys for turn in self._turns):
                    continue
                del self._references[key]
            self.block_writer.delete(key)

    def drop_orphans(self) -> int:
        """Have the blocks on this machine deleted that are in no conversation; returns how many there are.

        The block writer deletes them after what was saved before. A process that was killed in a turn leaves such
        blocks, and so does a deletion that this one was not told of. Raises `SessionUnavailableError`.
        """
        # In this order: a block belongs to a turn until its conversation is committed.
        blocks = self.block_writer.on_this_machine()
        with self._lock:
            blocks.difference_update(*(turn.saved_keys for turn in self._turns), *self._unsaved_keys.values())
        if blocks:
            blocks.difference_update(*(summary.keys for summary in self.summaries()))
        if blocks:  # some may be of another model's conversations
            blocks &= self.block_writer.own()
            # Not at once: a turn that begins now may save the same blocks, and the block writer stores them afterwards.
            if not self.block_writer.then(partial(self.drop, blocks)):
                self.drop(blocks)  # the engine is being closed: no turn begins
        return len(blocks)

    @contextmanager
    def telling(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        """The block deletes the entries of `keys`; the replicas that share the conversations are told of it."""
        yield

    def list(self, session_ids: Iterable[str] | None = None) -> tuple[SessionInfo, ...]:
        """Every session that has turns, the last used first; with `session_ids`, of these only."""
        summaries = self.summaries() if session_ids is None else self.known(session_ids)
        known = sorted(summaries, key=lambda summary: -summary.used_at)
        return tuple(self._info(summary) for summary in known if summary.turns)

    def has(self, session_id: str) -> bool:
        """Whether there is a session of that id that has turns."""
        return any(summary.turns for summary in self.known([session_id]))

    def ids(self) -> tuple[str, ...]:
        """The id of every session that has turns, in no order."""
        return tuple(summary.session_id for summary in self.summaries() if summary.turns)

    def uses(self) -> dict[str, float]:
        """When each session was used last (seconds since the epoch), by its id, the last used first."""
        known = sorted(self.summaries(), key=lambda summary: -summary.used_at)
        return {summary.session_id: summary.used_at for summary in known}

    def delete_all(self, session_ids: Iterable[str]) -> None:
        """Delete the conversations of these ids."""
        for session_id in session_ids:
            self.session(session_id).delete()

    def server_stats(self) -> RemoteStats | None:
        """The health of the server that replicas share, as conversations see it; `None` if they share none."""
        return None

    def flush(self) -> None:
        """Return when histories are exact, as far as the settings want it, and all blocks so far are in the store."""
        self._repair.flush()
        self.block_writer.flush()

    def close(self) -> None:
        """Save what waits and stop. Twice is harmless."""
        self._repair.close()
        self.block_writer.close()

    def _summary(self, session_id: str, conversation: Conversation) -> Summary:
        return Summary.of(session_id, conversation, self.block_writer.base)

    def _set_summary(self, session_id: str, new: Summary | None) -> set[EntryKey]:
        """Record what a conversation consists of; returns the keys that its history has no more. Needs `_lock`."""
        old = self._known.pop(session_id, None)
        if new is not None:
            self._known[session_id] = new
            self._references.update(new.keys)
        self._references.subtract(old.keys if old else ())
        return set(old.keys if old else ()) - set(new.keys if new else ())

    def _set_unsaved_keys(self, session_id: str, keys: Iterable[EntryKey]) -> set[EntryKey]:
        """Record which blocks an unsaved session has; returns the keys that its history has no more."""
        new = tuple(keys)
        with self._lock:
            old = self._unsaved_keys.pop(session_id, ())
            if new:
                self._unsaved_keys[session_id] = new
            self._references.update(new)
            self._references.subtract(old)
        return set(old) - set(new)

    def _set_ttl(self, session: Session, ttl_s: float | None) -> None:
        """Set a session's time to live, unless `ttl_s` is `None`. Needs `_lock`."""
        if ttl_s not in (None, session.conversation.ttl_s):
            session.conversation = replace(session.conversation, ttl_s=ttl_s)

    def _empty(self, ttl_s: float | None = None) -> Conversation:
        now = self.clock()
        return Conversation(created_at=now, used_at=now, ttl_s=ttl_s)

    def _forget_turns(self, session: Session) -> set[EntryKey]:
        """Empty a session in memory; returns the keys that its history had."""
        with self._lock:
            session.conversation = self._empty(session.conversation.ttl_s)
            session.version, session.notes = None, ()
            return self._set_summary(session.session_id, None)

    def _info(self, summary: Summary) -> SessionInfo:
        sizes = zip(summary.keys, summary.key_tokens, strict=True)
        stored = sum(tokens for key, tokens in sizes if self.block_writer.stored(key))
        size = stored * self.adapter.kv_bytes_per_token
        return SessionInfo(summary.session_id, summary.turns, summary.tokens, size, summary.used_at, summary.title)


__all__ = ["Sessions"]
