"""Conversations by their content: a list of messages that goes on from an earlier one finds that one's session.

What identifies a conversation is the text before its next question, word for word, as the template writes it. After
each answer the session is filed under the text that a next question would follow; a request looks for the text it
does follow. So nothing is asked of the user, and a session is used only where its stored ids are those that the
messages would give: whoever edits an earlier message, goes back or lets the session go elsewhere starts afresh, which
costs time, never an answer. A session is taken out while a request uses it: two that go on from the same text never
share one.
"""

import hashlib
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass

from ragkv.engine import Engine
from ragkv.session import Session

KEPT = 1_000  # conversations; the one that rested longest goes first


@dataclass(frozen=True, slots=True)
class Conversation:
    """A session, and the opening its prompts begin with."""

    session: Session
    opening: str | None = None  # text in place of the application's prefix; None: the prefix itself
    state: bytes = b""  # digest of the session's ids when it was filed
    by_content: bool = True  # found, and filed again, by what its messages say; else its session was named


class Conversations:
    """The conversations of one engine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._filed: OrderedDict[bytes, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._filed)

    def begin(self, opening: str | None) -> Conversation:
        """A new conversation."""
        return Conversation(self._engine.session(f"chat-{uuid.uuid4().hex}"), opening)

    def named(self, session_id: str, opening: str | None) -> Conversation:
        """The conversation in the session of that id."""
        return Conversation(self._engine.session(session_id), opening, by_content=False)

    def take(self, text: str) -> Conversation | None:
        """The conversation whose next question follows `text`, taken out; `None` if there is none as it was left."""
        with self._lock:
            found = self._filed.pop(_digest(text), None)
        if found is None or _state(found.session) != found.state:
            return None
        return found

    def file(self, text: str, conversation: Conversation) -> None:
        """Its next question would follow `text`."""
        filed = Conversation(conversation.session, conversation.opening, _state(conversation.session))
        with self._lock:
            replaced = self._filed.pop(_digest(text), None)
            self._filed[_digest(text)] = filed
            dropped = [self._filed.popitem(last=False)[1] for _ in range(len(self._filed) - KEPT)]
        for old in (replaced, *dropped):
            if old is not None:
                self.drop(old)

    def drop(self, conversation: Conversation) -> None:
        """Forget a conversation: nobody will go on with it."""
        conversation.session.reset()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _state(session: Session) -> bytes:
    return hashlib.blake2b(repr(session.token_ids).encode(), digest_size=16).digest()
