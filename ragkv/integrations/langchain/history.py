"""`RagKVChatMessageHistory`: the messages of a conversation, durable if the engine has a directory.

It stores text and no KV. The model finds the session of a conversation by the content of its
messages (see `ragkv.chat.finder`), so any history that returns the same messages gets
the stored KV. `clear` deletes both.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import BaseMessage, messages_from_dict, messages_to_dict

from ragkv.chat import PlainMessage
from ragkv.errors import InputError, RagKVError, SessionUnavailableError
from ragkv.runtime import aside_of, make_private_folder, read_own, replace_file

from .chat import ChatRagKV
from .messages import chat_input

_lock = threading.Lock()  # for all histories, in files and in memory; each access is short


class RagKVChatMessageHistory(BaseChatMessageHistory):
    """The messages of `session_id`: in a JSON file in the engine's directory, or in the memory of
    this process.
    """

    def __init__(self, session_id: str, llm: ChatRagKV) -> None:
        """Loads nothing. The same `session_id` on the same engine is the same history."""
        if not session_id:
            raise InputError("session_id is empty. A history needs a name.")
        self.session_id = session_id
        self._llm = llm

    @property
    def messages(self) -> list[BaseMessage]:  # type: ignore[override]
        with self._held():
            return self._read()

    def add_messages(self, messages: Sequence[BaseMessage]) -> None:
        """Append `messages`. They are durable when this returns, if the engine has a directory."""
        with self._held():
            self._write([*self._read(), *messages])

    def clear(self) -> None:
        """Delete the messages and the session that was saved for them."""
        with self._held():
            messages = self._read()
            self._write([])
        try:
            turns = self._llm.shared.template.messages(chat_input(messages, (), "").messages)
            head = self._llm.shared.template.head([*turns, PlainMessage("user", "")])
        except RagKVError:  # messages that the model refuses have no session
            return
        self._llm.shared.conversations.delete(head)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock of all histories, once the model is loaded: that may take minutes."""
        _ = self._llm.shared
        with _lock:
            yield

    def _path(self) -> Path | None:
        directory = self._llm.shared.engine.config.store.directory
        if directory is None:
            return None
        name = hashlib.blake2b(self.session_id.encode(), digest_size=16).hexdigest()
        return Path(directory) / "histories" / f"{name}.json"

    def _read(self) -> list[BaseMessage]:
        path = self._path()
        if path is None:
            return list(self._llm.shared.histories.get(self.session_id, ()))
        try:
            return read_own(path, lambda saved: messages_from_dict(saved["messages"])) or []
        except OSError as error:  # the next message would replace a history that may be sound
            raise SessionUnavailableError(
                f"The history of {self.session_id!r} cannot be read: {error}. It was left as it is: "
                "ask again, or check the disk and who may read the file."
            ) from error

    def _write(self, messages: Sequence[BaseMessage]) -> None:
        path = self._path()
        if path is None:
            self._llm.shared.histories[self.session_id] = list(messages)
            return
        make_private_folder(path.parent)
        if not messages:
            path.unlink(missing_ok=True)
            aside_of(path).unlink(missing_ok=True)  # of an earlier one that was damaged
            return
        text = json.dumps(
            {"session_id": self.session_id, "messages": messages_to_dict(messages)},
            ensure_ascii=False,
        )
        replace_file(path, text.encode("utf-8"))
