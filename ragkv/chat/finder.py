"""Finds conversations by their content: messages that continue an earlier conversation find its
session.

A conversation is identified by the text before the next question, exactly as the template writes
it. After each answer the session is saved under a digest of that text. A request looks up the text
before its own question. A session is used only if its stored ids are those that the messages would
give. So if an earlier message was edited, the conversation is computed again. That costs time and
never changes an answer.

Saved sessions do not change. Each turn works on an unsaved copy, which shares the session's blocks.
So an answer can be requested again, and a conversation can branch. Replicas that share sessions
find what one of them saved. If the shared server is away, a request is computed from its messages,
and its report says so.
"""

import contextlib
import hashlib
import logging
import threading
import uuid
from dataclasses import dataclass

from ragkv.engine import Engine
from ragkv.errors import InputError, RagKVError, SessionConflictError, SessionUnavailableError
from ragkv.sessions import Session

log = logging.getLogger(__name__)

MAX_SAVED = 1_000  # the most saved sessions, one for each turn: the oldest are deleted
TRIMMED = 32  # turns between two deletions of the oldest sessions
# How the ids of saved sessions begin, and of sessions in which a turn is answered.
_SAVED = "chat-"
_IN_PROGRESS = "turn-"


@dataclass(frozen=True, slots=True)
class FoundConversation:
    """A session for one turn."""

    session: Session
    generation: int  # of `ConversationFinder` when the turn began: `delete_all` starts a new one
    by_content: bool = True  # found or saved by its messages; False: the caller named the session
    turns: int = 0  # earlier turns
    tokens: int = 0  # of the earlier turns


class ConversationFinder:
    """The conversations of one engine. Asks a server for nothing before the first request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._saves = 0  # since the start
        # Ids that are to be deleted, by the number of the last order to do so. They stay until the
        # server that replicas share has confirmed it.
        self._to_delete: dict[str, int] = {}
        self._orders = 0
        self._generation = 0  # how often `delete_all` was called
        # The last of these calls whose deletions the server has confirmed.
        self._confirmed = 0

    def named(self, session: Session) -> FoundConversation:
        """The conversation in a session of the caller's. Raises `SessionUnavailableError`."""
        session.bring_up_to_date()
        return FoundConversation(
            session, self._generation, False, session.turns, len(session.token_ids)
        )

    def resume(self, text: str) -> FoundConversation:
        """The conversation whose next question follows `text`; a new one if there is none or it
        cannot be read.
        """
        with self._lock:
            generation = self._generation
        past: Session | None = None
        notes: tuple[str, ...] = ()
        try:
            self._delete_ordered()
            found = self._engine.session(_saved_id(text))
            past = found if found.turns else None  # there is none, it was deleted, or it expired
        except SessionUnavailableError as error:
            log.debug("A conversation was not looked up: %s", error)
            notes = (
                "the state of conversations cannot be read: this one is computed from its messages",
            )
        session = self._engine.sessions.unsaved(f"{_IN_PROGRESS}{uuid.uuid4().hex}", past, notes)
        return FoundConversation(session, generation, True, session.turns, len(session.token_ids))

    def save(self, text: str, conversation: FoundConversation) -> tuple[str, ...]:
        """Save an answered turn: its next question would follow `text`. Returns notes for the
        answer's report.
        """
        name = _saved_id(text)
        notes = tuple[str, ...]()
        try:
            if conversation.generation == self._generation:  # else all were deleted during the turn
                # the same messages are saved already
                with contextlib.suppress(InputError, SessionConflictError):
                    conversation.session.fork(name)
                self._count(name, conversation.generation)
        except SessionUnavailableError as error:
            log.debug("A conversation was not saved: %s", error)
            notes = (
                "the state of conversations cannot be read or written: this turn is not stored for "
                "the next one",
            )
        finally:
            conversation.session.delete()
        return notes

    def delete_all(self) -> None:
        """Delete every saved session. Turns in progress will not be saved either.

        If the server that replicas share does not answer, no session is found here until it has
        confirmed it.
        """
        with self._lock:
            self._generation += 1
        self._delete_soon()

    def delete(self, text: str) -> None:
        """Delete the session that a question after `text` would find."""
        with self._lock:
            self._order(_saved_id(text))
        self._delete_soon()

    def _count(self, name: str, generation: int) -> None:
        """Count a saved session, or delete it if all were deleted while it was saved. At times have
        old ones deleted.
        """
        with self._lock:
            self._saves += 1
            is_kept = generation == self._generation
            is_time = self._saves % TRIMMED == 0
            if not is_kept:
                self._order(name)
        if is_time:
            self._engine.sessions.in_background(self._delete_old)
        if not is_kept:
            self._delete_ordered()

    def _delete_old(self) -> None:
        """Delete the oldest saved sessions. No request waits for this."""
        try:
            self._engine.sessions.delete_all(self._saved_names()[MAX_SAVED:])
        except RagKVError as error:  # or the engine was closed
            log.debug("Old conversations were not deleted; a later turn does it: %s", error)

    def _delete_ordered(self) -> None:
        """Delete what is to be deleted. Raises `SessionUnavailableError`, and does the rest the
        next time.
        """
        with self._lock:
            ordered = self._to_delete.copy()
            generation = self._generation
            is_all = self._confirmed < generation
        names = {*ordered, *(self._saved_names() if is_all else ())}
        if names:
            self._engine.sessions.delete_all(names)
        with self._lock:  # what was ordered meanwhile is not confirmed by this
            for name, order in ordered.items():
                if self._to_delete.get(name) == order:
                    del self._to_delete[name]
            self._confirmed = max(self._confirmed, generation)

    def _order(self, name: str) -> None:
        """Have a session deleted with the next ones. The caller holds the lock."""
        self._orders += 1
        self._to_delete[name] = self._orders

    def _saved_names(self) -> list[str]:
        """The saved sessions that are stored, the last used first. Raises
        `SessionUnavailableError`.
        """
        names = self._engine.sessions.ids(idle=True)
        return [name for name in names if name.startswith(_SAVED)]

    def _delete_soon(self) -> None:
        try:
            self._delete_ordered()
        except SessionUnavailableError as error:
            log.warning(
                "Conversations are deleted with the next request that can reach where they are kept: %s",
                error,
            )


def _saved_id(text: str) -> str:
    return (
        _SAVED + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )
