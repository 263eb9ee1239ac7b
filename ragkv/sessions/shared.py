"""Conversations that any replica may go on with: their state lies on a server, and is looked at before it is used.

A turn begins with the newest state and ends by writing its own, before its answer is reported complete: whoever asks
next, anywhere, finds it. Two replicas that answer turns of one conversation at once both compute, and the second to end
is told (`manifest_shared.py`); on one replica they wait for each other, so it pays to send a conversation to the same.
Where the state cannot be had nothing is answered on one that may be old. Blocks are the store's: those that are in no
tier of this replica, nor in one that replicas share, are computed.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import time

from ragkv.errors import SessionUnavailableError
from ragkv.history import BlockWriter, Conversation

from .manifest import Summary
from .session import House, Session, SessionInfo, Sessions
from .shared_manifest import SharedManifests

log = logging.getLogger(__name__)

POLL_S = 2.0  # how often what others deleted is looked for, and what was idle for too long


class SharedSessions(Sessions):
    """The conversations of one engine, and of every other engine on that server with its model and tenant."""

    def __init__(
        self, house: House, saver: BlockWriter, shared: SharedManifests, clock: Callable[[], float] = time
    ) -> None:
        """`shared` is closed with this."""
        self._shared = shared
        super().__init__(house, saver, None, clock)
        self._seen_deletions = "0"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="ragkv-sessions", daemon=True)
        self._thread.start()

    def refresh(self, session: Session) -> None:
        """Bring a session up to what others made of it. The caller holds it. Raises `SessionUnavailableError`."""
        found = self._shared.load(session.session_id, session.version)
        if found is None:
            return
        conversation = found.conversation
        if conversation is None:
            now = self.now()
            conversation = Conversation(created_at=now, used_at=now, ttl_s=session.conversation.ttl_s)
        with self._lock:
            session.conversation, session.version = conversation, found.version
            session.notes = (found.note,) if found.note else ()
            self._know(session)

    def commit(self, session: Session, conversation: Conversation) -> None:
        """Replace a session's state, for everybody, once it is written. The caller holds it.

        Raises `SessionConflictError` and `SessionUnavailableError`; then the state is as it was.
        """
        conversation = replace(conversation, used_at=self.now())
        own = conversation.ttl_s
        ttl_s = self.house.settings.ttl_s if own is None else own
        session.version = self._shared.save(session.session_id, conversation, session.version, ttl_s)
        with self._lock:
            old = self._known.get(session.session_id)
            session.conversation = conversation
            new = self._know(session)
        if gone := set(old.keys if old else ()) - set(new.keys):
            self._saver.then(lambda: self._drop_unless_used(gone))

    def clear(self, session: Session) -> None:
        """Forget a session's turns, everywhere. The caller holds it. Raises `SessionUnavailableError`."""
        self._shared.delete(session.session_id)
        with self._lock:
            old = self._known.pop(session.session_id, None)
            now = self.now()
            session.conversation = Conversation(created_at=now, used_at=now, ttl_s=session.conversation.ttl_s)
            session.version, session.notes = None, ()
        self._drop_unless_used(set(old.keys if old else ()))

    def announce(self, keys: Sequence[str]) -> None:
        """Have entries deleted by every replica; if that cannot be said now, a sweep of the corpus will do it."""
        try:
            if keys:
                self._shared.announce(keys)
        except SessionUnavailableError as error:
            log.warning("Other replicas may keep %d deleted entries: %s", len(keys), error)

    def list(self) -> tuple[SessionInfo, ...]:
        self._learn()
        return super().list()

    def ids(self) -> tuple[str, ...]:
        return self._shared.ids()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        super().close()
        self._shared.close()

    def _opened(self, session_id: str) -> Session:
        now = self.now()
        session = Session(self, session_id, Conversation(created_at=now, used_at=now), None)
        self._live[session_id] = session
        return session

    def _clear_idle(self, session: Session) -> None:
        """Look at it now, unless a turn runs: who holds it next looks again."""
        if session.lock.acquire(blocking=False):
            try:
                self.refresh(session)
            finally:
                session.lock.release()

    def _live_for(self, session: Session, ttl_s: float | None) -> None:
        """Holds from the next turn on."""
        session.conversation = replace(session.conversation, ttl_s=ttl_s)

    def _write_behind(self, session: Session) -> None:
        """It is written already."""

    def _expired(self, session_id: str) -> bool:
        """The server knows, and has deleted it."""
        return False

    def _sweep(self) -> None:
        """Done by a thread."""

    def _know(self, session: Session) -> Summary:
        """Note what a session consists of. The caller has the books."""
        new = Summary.of(session.session_id, session.conversation, self.house.identity)
        self._known[session.session_id] = new
        return new

    def _learn(self) -> None:
        """Note what all conversations consist of, whoever served them."""
        summaries = {summary.session_id: summary for summary in self._shared.summaries()}
        with self._lock:
            self._known = summaries
            self._references = Counter(key for summary in summaries.values() for key in summary.keys)

    def _drop_unless_used(self, keys: set[str]) -> None:
        """Delete blocks that are part of no history, as far as can be known."""
        if not keys:
            return
        try:
            self._learn()
        except SessionUnavailableError as error:
            log.warning("Blocks of a conversation were not deleted: %s", error)
            return
        for key in keys:
            self.drop(key)

    def _keep_up(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self._shared.sweep()
                self._seen_deletions, keys = self._shared.deleted(self._seen_deletions)
                self._drop_unless_used(set(keys))
            except SessionUnavailableError as error:
                log.debug("%s", error)
            except Exception:  # the thread must live on
                log.exception("Deletions by other replicas were not followed; trying again.")


__all__ = ["SharedSessions"]
