"""`RagKVChatMessageHistory`: the messages of a conversation, durable where the engine has a directory.

It keeps words, not KV: the model finds a conversation's session by the content of its messages (see `conversations`),
so whatever brings the same messages back, this or another history, brings the stored KV back too. `clear` lets go of
both.
"""

import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage, messages_from_dict, messages_to_dict

from ragkv.dialogue import Turn
from ragkv.errors import InputError, RagKVError

from .chat import ChatRagKV
from .messages import request
from .registry import Shared

log = logging.getLogger(__name__)

_lock = threading.Lock()  # of every file and of what is kept in memory; messages are small


class RagKVChatMessageHistory(BaseChatMessageHistory):
    """The messages of `session_id`, beside the engine's store: a small JSON file, or this process's memory."""

    def __init__(self, session_id: str, llm: ChatRagKV) -> None:
        """Loads nothing; the same `session_id` on the same engine is the same history."""
        if not session_id:
            raise InputError("A history needs a session_id that is not empty.")
        self.session_id = session_id
        self._llm = llm

    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override]
        with _lock:
            return self._read()

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Add `messages` at the end; durable when this returns, where the engine has a directory."""
        with _lock:
            self._write([*self._read(), *messages])

    def clear(self) -> None:
        """Forget the messages, and the session that stands for them."""
        with _lock:
            gone = self._read()
            self._write([])
        try:
            turns = self._shared.template.turns(request(gone, (), "").turns)
            head = self._shared.template.head([*turns, Turn("user", "")])
        except RagKVError:  # messages that the model would not take have no session
            return
        self._shared.conversations.forget(head)

    @property
    def _shared(self) -> Shared:
        return self._llm.shared

    def _path(self) -> Path | None:
        directory = self._shared.engine.config.store.directory
        if directory is None:
            return None
        name = hashlib.blake2b(self.session_id.encode(), digest_size=16).hexdigest()
        return Path(directory) / "histories" / f"{name}.json"

    def _read(self) -> list[BaseMessage]:
        path = self._path()
        if path is None:
            return list(self._shared.histories.get(self.session_id, ()))
        try:
            saved: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return messages_from_dict(saved["messages"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("The history of %r cannot be read (%s); it begins anew.", self.session_id, error)
            return []

    def _write(self, messages: Sequence[BaseMessage]) -> None:
        path = self._path()
        if path is None:
            self._shared.histories[self.session_id] = list(messages)
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not messages:
            path.unlink(missing_ok=True)
            return
        text = json.dumps({"session_id": self.session_id, "messages": messages_to_dict(messages)}, ensure_ascii=False)
        draft = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
