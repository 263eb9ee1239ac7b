"""The stored responses of one tenant: what `previous_response_id` continues, and `GET /v1/responses/{id}` returns.

Each is a JSON file with the response and the turns of its conversation, so that deleting one harms no other. The KV of
the turns is not here: a conversation finds it by its text. The least recently used ones are deleted beyond the
limits. What the files say goes to no log.
"""

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.api.chat import Tool, ToolCall, Turn
from ragkv.runtime import make_private_folder, replace_file

log = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20  # of all files of a tenant
DRAFT_S = 3600.0  # a draft that is older was left by a crash
_ID = re.compile(r"resp_[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to it."""

    response: dict[str, Any]  # as the client gets it
    turns: tuple[Turn, ...]  # its answer is the last; without the instructions
    instructions: str
    tools: tuple[Tool, ...]  # as chat templates read them

    @property
    def prompt_turns(self) -> tuple[Turn, ...]:
        """The turns as the prompt had them."""
        return (Turn("system", self.instructions), *self.turns) if self.instructions else self.turns


class StoredResponses:
    """Responses by their id, in a folder. Thread-safe."""

    def __init__(self, folder: Path, ttl_s: float | None) -> None:
        """`ttl_s`: a response that is idle for longer is deleted; `None`: never."""
        self._folder, self._ttl_s = folder, ttl_s
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] | None = None  # bytes by id, least recently used first; None: not read yet

    def save(self, stored: StoredResponse, limit: int | None) -> None:
        """Store a response durably; beyond `limit` responses the least recently used are deleted. Raises `OSError`."""
        name = stored.response["id"]
        data = json.dumps(asdict(stored)).encode()
        make_private_folder(self._folder)
        with self._lock:
            sizes = self._listed()
            replace_file(self._path(name), data)
            sizes[name] = len(data)
            while len(sizes) > 1 and (sum(sizes.values()) > MOST_BYTES or (limit is not None and len(sizes) > limit)):
                oldest, _ = sizes.popitem(last=False)
                self._path(oldest).unlink(missing_ok=True)

    def load(self, name: str) -> StoredResponse | None:
        """The response of that id; `None` if there is none."""
        if _ID.fullmatch(name) is None:
            return None
        path = self._path(name)
        try:
            if self._ttl_s is not None and time.time() - path.stat().st_mtime > self._ttl_s:
                self.delete(name)
                return None
            value = json.loads(path.read_bytes())
            os.utime(path)  # when it was used last
            turns = tuple(map(_turn, value["turns"]))
            found = StoredResponse(value["response"], turns, value["instructions"], tuple(value["tools"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            log.exception("response_not_read")
            return None
        with self._lock:
            sizes = self._listed()
            if name in sizes:
                sizes.move_to_end(name)
        return found

    def delete(self, name: str) -> None:
        """Delete the response of that id, if there is one."""
        if _ID.fullmatch(name) is None:
            return
        with self._lock:
            self._listed().pop(name, None)
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _listed(self) -> OrderedDict[str, int]:
        """The sizes of the files. Needs `_lock`."""
        if self._sizes is None:
            found = []
            with contextlib.suppress(FileNotFoundError):
                for file in self._folder.iterdir():
                    name, status = file.stem, file.stat()
                    if _ID.fullmatch(name) is not None:
                        found.append((status.st_mtime, name, status.st_size))
                    elif time.time() - status.st_mtime > DRAFT_S:
                        file.unlink()
            self._sizes = OrderedDict((name, size) for _, name, size in sorted(found))
        return self._sizes


def _turn(value: dict[str, Any]) -> Turn:
    return Turn(**{**value, "calls": tuple(ToolCall(**call) for call in value["calls"])})
