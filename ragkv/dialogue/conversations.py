"""Conversations found by their content: a list of messages that continues an earlier list finds its session.

The text before the next question identifies a conversation, word for word as the template writes it. After each answer
the session is saved under a digest of the text that the next question would follow. A request looks up the text before
its own question. The user does nothing for it, and it outlives the process if the engine's sessions do. A session is
used only if its stored ids are the ids that the messages would give: after an edit of an earlier message the
conversation starts afresh, which costs time and never changes an answer.

Saved sessions do not change: each turn works on a fork, which shares their blocks. So an answer can be requested again,
a conversation can branch, and two requests that continue from the same text do not disturb each other.
"""

import contextlib
import hashlib
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass

from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.sessions import Session

MAX_SAVED = 1_000  # saved sessions, one for each turn; the least recently used is deleted first
_SAVED, _IN_PROGRESS = "chat-", "chat-turn-"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session for one turn."""

    session: Session
    generation: int  # of `Conversations` when the turn began: `clear` starts a new one
    by_content: bool = True  # found or saved by its messages; False: the caller named the session
    turns: int = 0  # earlier turns
    tokens: int = 0  # of the earlier turns


class Conversations:
    """The conversations of one engine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        ids = [info.session_id for info in reversed(engine.sessions())]  # least recently used first
        for session_id in ids:
            if session_id.startswith(_IN_PROGRESS):  # its process died during the turn
                engine.delete_session(session_id)
        saved = (name for name in ids if name.startswith(_SAVED) and not name.startswith(_IN_PROGRESS))
        self._saved: OrderedDict[str, None] = OrderedDict.fromkeys(saved)
        self._generation = 0

    def begin(self) -> Conversation:
        """A new conversation."""
        return Conversation(self._engine.session(_new_id()), self._generation)

    def named(self, session_id: str) -> Conversation:
        """The conversation in the session `session_id`."""
        session = self._engine.session(session_id)
        return Conversation(session, self._generation, False, session.turns, len(session.token_ids))

    def resume(self, text: str) -> Conversation | None:
        """The conversation whose next question follows `text`, or `None`."""
        name = _saved_id(text)
        with self._lock:
            if name not in self._saved:
                return None
            self._saved.move_to_end(name)
            generation = self._generation
        saved = self._engine.session(name)
        if not saved.turns:  # it was deleted, or it expired
            return None
        session = saved.fork(_new_id())
        return Conversation(session, generation, True, session.turns, len(session.token_ids))

    def save(self, text: str, conversation: Conversation) -> None:
        """Save an answered turn: its next question would follow `text`."""
        name = _saved_id(text)
        with self._lock:
            if conversation.generation == self._generation:  # else all were cleared during the turn
                with contextlib.suppress(InputError):  # the same messages are saved already
                    conversation.session.fork(name)
                self._saved[name] = None
                self._saved.move_to_end(name)
        conversation.session.delete()
        with self._lock:
            dropped = [self._saved.popitem(last=False)[0] for _ in range(len(self._saved) - MAX_SAVED)]
        for old in dropped:
            self._engine.delete_session(old)

    def clear(self) -> None:
        """Delete every saved session. Turns in progress will not be saved either."""
        with self._lock:
            self._generation += 1
            dropped, self._saved = list(self._saved), OrderedDict()
        for name in dropped:
            self._engine.delete_session(name)

    def forget(self, text: str) -> None:
        """Delete the session that a question after `text` would find."""
        name = _saved_id(text)
        with self._lock:
            known = name in self._saved
            self._saved.pop(name, None)
        if known:
            self._engine.delete_session(name)


def _new_id() -> str:
    return f"{_IN_PROGRESS}{uuid.uuid4().hex}"


def _saved_id(text: str) -> str:
    return _SAVED + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
