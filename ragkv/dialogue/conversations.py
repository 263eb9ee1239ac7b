"""Conversations by their content: a list of messages that goes on from an earlier one finds that one's session.

What identifies a conversation is the text before its next question, word for word, as the template writes it. After
each answer its session is filed under a digest of the text that a next question would follow; a request looks for the
text it does follow. So nothing is asked of the user, it outlives the process where the engine's sessions do, and a
session is used only where its stored ids are those that the messages would give: whoever edits an earlier message
starts afresh, which costs time, never an answer.

Filed sessions do not change: a turn works on a fork, which shares their blocks. So an answer can be asked for again, a
conversation can branch, and two requests that go on from the same text do not meet.
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

KEPT = 1_000  # filed sessions, a turn each; the one that rested longest goes first
_FILED, _WORKING = "chat-", "chat-turn-"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session for one turn."""

    session: Session
    opening: str | None = None  # text in place of the application's prefix; None: the prefix itself
    era: int = 0  # of the conversations it goes on among: see `clear`
    by_content: bool = True  # filed by what its messages say; else its session was named
    turns: int = 0  # that were said before
    tokens: int = 0  # of those turns


class Conversations:
    """The conversations of one engine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        ids = [info.session_id for info in reversed(engine.sessions())]  # the last used last
        for session_id in ids:
            if session_id.startswith(_WORKING):  # a turn that its process did not end
                engine.delete_session(session_id)
        filed = (name for name in ids if name.startswith(_FILED) and not name.startswith(_WORKING))
        self._filed: OrderedDict[str, None] = OrderedDict.fromkeys(filed)
        self._era = 0  # ends where all are forgotten: what is under way then is not filed

    def __len__(self) -> int:
        return len(self._filed)

    def begin(self, opening: str | None) -> Conversation:
        """A new conversation."""
        return Conversation(self._engine.session(_working_id()), opening, self._era)

    def named(self, session_id: str, opening: str | None) -> Conversation:
        """The conversation in the session of that id."""
        session = self._engine.session(session_id)
        return Conversation(session, opening, self._era, False, session.turns, len(session.token_ids))

    def going_on(self, text: str, opening: str | None) -> Conversation | None:
        """The conversation whose next question follows `text`; `None` if there is none."""
        name = _filed_id(text)
        with self._lock:
            if name not in self._filed:
                return None
            self._filed.move_to_end(name)
            era = self._era
        filed = self._engine.session(name)
        if not filed.turns:  # it was deleted, or rested for longer than the engine keeps sessions
            return None
        session = filed.fork(_working_id())
        return Conversation(session, opening, era, True, session.turns, len(session.token_ids))

    def file(self, text: str, conversation: Conversation) -> None:
        """The turn is answered: a next question would follow `text`."""
        name = _filed_id(text)
        with self._lock:
            wanted = conversation.era == self._era
            if wanted:
                with contextlib.suppress(InputError):  # the very same was said before
                    conversation.session.fork(name)
                self._filed[name] = None
                self._filed.move_to_end(name)
        conversation.session.delete()
        with self._lock:
            gone = [self._filed.popitem(last=False)[0] for _ in range(len(self._filed) - KEPT)]
        for old in gone:
            self._engine.delete_session(old)

    def drop(self, conversation: Conversation) -> None:
        """The turn came to nothing, or nobody can go on from it."""
        conversation.session.delete()

    def clear(self) -> None:
        """Delete every filed session; a turn under way will not be filed either."""
        with self._lock:
            self._era += 1
            gone, self._filed = list(self._filed), OrderedDict()
        for name in gone:
            self._engine.delete_session(name)

    def forget(self, text: str) -> None:
        """Delete the session that a question behind `text` would find."""
        name = _filed_id(text)
        with self._lock:
            known = self._filed.pop(name, _FILED) is None
        if known:
            self._engine.delete_session(name)


def _working_id() -> str:
    return f"{_WORKING}{uuid.uuid4().hex}"


def _filed_id(text: str) -> str:
    return _FILED + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
