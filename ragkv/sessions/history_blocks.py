"""Saves the blocks of all histories for turns, and deletes a block once no history needs it.

Histories share blocks: a fork has those of its past, and every turn those of the turn before. So a
block is deleted only if no running turn and no session of any replica has it.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import torch

from ragkv.errors import SessionUnavailableError
from ragkv.prompt.history import Block, BlockWriter, SessionState
from ragkv.store.entry import EntryKey

from .session import Session
from .storage import SessionStorage
from .turn import Turn

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HistoryBlocks:
    """Which blocks are in use."""

    writer: BlockWriter
    storage: SessionStorage  # keeps the states of sessions
    # Guards the fields below. No thread waits for a disk or a server while it holds this lock.
    _lock: threading.Condition = field(default_factory=threading.Condition, init=False)
    _turns: set[Turn] = field(default_factory=set, init=False)  # under way
    # sessions that the storage does not know
    _unsaved: WeakSet[Session] = field(default_factory=WeakSet, init=False)
    # the keys of histories that become those of other sessions now
    _copying: list[set[EntryKey]] = field(default_factory=list, init=False)
    # those that could not be deleted, and will be
    _undeleted: set[EntryKey] = field(default_factory=set, init=False)
    # the blocks that are just being deleted; more than once, by several threads
    _being_deleted: Counter[EntryKey] = field(default_factory=Counter, init=False)

    def keys(self, state: SessionState) -> set[EntryKey]:
        """The keys of the blocks of a history."""
        return set(map(self.writer.key, state.history.blocks))

    def save(self, block: Block, kv: torch.Tensor, group: str, wait_s: float) -> bool:
        """See `BlockWriter.save`. A block that is just being deleted is stored after that."""
        until = time.monotonic() + wait_s
        key = self.writer.key(block)
        with self._lock:
            if not self._lock.wait_for(lambda: key not in self._being_deleted, wait_s):
                return False
        return self.writer.save(block, kv, group, max(0.0, until - time.monotonic()))

    @contextmanager
    def used_by(self, turn: Turn) -> Iterator[None]:
        """What the turn saves is in use during the block."""
        with self._lock:
            self._turns.add(turn)
        try:
            yield
        finally:
            with self._lock:
                self._turns.discard(turn)

    def keep(self, unsaved: Session) -> None:
        """The blocks of a session that the storage does not know are in use while it lives."""
        with self._lock:
            self._unsaved.add(unsaved)

    @contextmanager
    def copied(self, session: Session) -> Iterator[SessionState]:
        """The session's state, none of whose blocks is deleted before another session has it."""
        with self._lock:
            past = session.state
            keys = self.keys(past)
            self._copying.append(keys)
        try:
            yield past
        finally:
            with self._lock:
                self._copying.remove(keys)

    def delete_unused(self, keys: Iterable[EntryKey] = ()) -> None:
        """Delete the blocks of these keys that are not in use.

        Blocks that could not be deleted before are tried again: a tier failed, or the server that
        replicas share did not say what is in use.
        """
        with self._lock:
            dropped = self._undeleted.union(keys)
            self._undeleted = set()
        if not dropped:
            return
        # `save` waits while a key is noted, so a turn stores its block when the deletion is over.
        # The keys are noted first and `_used` reads then, so it sees what was saved before. The
        # writer's own thread stores nothing before this returns, so it notes nothing.
        noted = set() if self.writer.worker.is_current else dropped
        with self._lock:
            self._being_deleted.update(noted)
        left = dropped
        try:
            left = {key for key in dropped - self._used() if not self.writer.delete(key)}
        except SessionUnavailableError as error:
            log.warning("Blocks of a conversation are deleted later: %s", error)
        finally:
            with self._lock:
                self._undeleted |= left
                self._being_deleted -= Counter(noted)
                self._lock.notify_all()

    def delete_unused_later(self, keys: Set[EntryKey]) -> None:
        """`delete_unused` on the block writer's thread: it reads what all sessions have."""
        if keys and not self.writer.then(partial(self.delete_unused, keys)):
            with self._lock:
                self._undeleted |= keys

    def delete_orphans(self) -> int:
        """Have the blocks on this machine deleted that are not in use; returns how many there are.

        The block writer deletes them after what was saved before. A process that was killed in a
        turn leaves such blocks, and so does a deletion that this one was not told of.
        """
        blocks = self.writer.on_this_machine()
        if blocks:
            blocks -= self._used()
        if not self.storage.lists_all:
            return 0
        if blocks:  # some may be of another model's sessions
            blocks &= self.writer.own()
            # Not at once: a turn that begins now may save the same blocks, and the block writer
            # stores them afterwards.
            if not self.writer.then(partial(self.delete_unused, blocks)):
                self.delete_unused(blocks)  # the engine is being closed: no turn begins
        return len(blocks)

    def _used(self) -> set[EntryKey]:
        """The keys of the blocks that turns under way or histories have, of any replica."""
        # In this order: a block belongs to a turn until its session is committed.
        with self._lock:
            used = {key for turn in self._turns for key in turn.saved_keys}.union(*self._copying)
            unsaved = tuple(self._unsaved)
        used.update(*(self.keys(session.state) for session in unsaved))
        return used.union(*(summary.keys for summary in self.storage.summaries()))
