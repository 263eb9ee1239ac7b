"""Sessions of this process alone, which are saved nowhere.

The turn of a conversation that is found by its messages works on one, and `fork` saves it under an id once the turn is
answered. No other process can see it, so none can delete it during its turn, and it needs no server that replicas
share. It ends with its process; its blocks are then evicted like any entry that is not used.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ragkv.prompt.history import Conversation
from ragkv.store import EntryKey

from .manifest import Summary
from .session import Session, SessionOwner


class UnsavedSessions(SessionOwner):
    """The unsaved sessions of one engine. Thread-safe."""

    def __init__(self, saved: SessionOwner, set_keys: Callable[[str, Iterable[EntryKey]], set[EntryKey]]) -> None:
        """`set_keys` records the keys of the blocks of a session, and returns those that it has no more."""
        self.settings, self.clock = saved.settings, saved.clock
        self.adapter, self.runs, self.block_writer = saved.adapter, saved.runs, saved.block_writer
        self.request_numbers = saved.request_numbers
        self._saved, self._set_keys = saved, set_keys

    def new(self, session_id: str, past: Session | None = None, notes: tuple[str, ...] = ()) -> Session:
        """A session with the past of another one, or with none. `notes` are for the report of its first turn."""
        session = Session(self, session_id, self._empty() if past is None else past.conversation, notes)
        if past is not None:
            session.discard_by = past.discard_by
            self._count(session)
        return session

    def refresh(self, session: Session) -> None:
        """Nothing: no other process changes the session."""

    def commit(self, session: Session, conversation: Conversation) -> None:
        session.conversation = replace(conversation, used_at=self.clock())
        if unused := self._count(session):
            self.block_writer.then(lambda: self.drop(unused))

    def clear(self, session: Session) -> None:
        session.conversation = self._empty()
        self.drop(self._count(session))

    def delete(self, session: Session) -> None:
        self.clear(session)
        session.deleted = True

    def fork(self, session: Session, session_id: str) -> Session:
        return self._saved.fork(session, session_id)

    def drop(self, keys: Iterable[EntryKey]) -> None:
        self._saved.drop(keys)

    def _empty(self) -> Conversation:
        now = self.clock()
        return Conversation(created_at=now, used_at=now)

    def _count(self, session: Session) -> set[EntryKey]:
        """Record which blocks the session's history has; returns the keys that it has no more."""
        summary = Summary.of(session.session_id, session.conversation, self.block_writer.base)
        return self._set_keys(session.session_id, summary.keys)


__all__ = ["UnsavedSessions"]
