"""Finds out what KV a request will read, so that a router can choose the replica that has it.

The conversation has a name or is identified by its first messages. Documents come with the request, or are searched in
the shared index (read-only, BM25), which finds most of what the replica will find. The result is a hint: parts that are
not found, or not in time, are left out, and no request fails because of it.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ragkv.api import ANONYMOUS, DEFAULT_COLLECTION, KeyRing, ServeConfig
from ragkv.api.documents.collection_folders import CollectionFolders
from ragkv.api.middleware.body import count_values
from ragkv.retrieval import look_into
from ragkv.retrieval.filters import condition_of
from ragkv.retrieval.retrievers import Query, bm25

from .replica_routing import Parts, RoutedPart

log = logging.getLogger(__name__)

CHARS_PER_TOKEN = 4  # `CHARS_PER_TOKEN` is an estimate: routers weigh parts and need no exact counts.
SESSION_TOKENS = 2_000  # `SESSION_TOKENS` is the weight of a conversation's history against chunks.
_SESSION = re.compile(r"/v1/sessions/([^/]+)")


class RequestInspector:
    """Finds the parts of an HTTP request that may be stored."""

    def __init__(self, config: ServeConfig) -> None:
        self._home, self._limits, self._keys = Path(config.home), config.limits, KeyRing(config.keys_path)

    def inspect(self, path: str, headers: Mapping[str, str], body: bytes) -> Parts:
        """The request as a router sees it. An invalid request gives an empty result; the replica will refuse it."""
        caller = headers.get("authorization", "")
        try:
            fields = json.loads(body) if self._is_worth_parsing(path, headers, body) else {}
            fields = fields if isinstance(fields, dict) else {}
            session = _session_of(path, headers, fields)
            parts = [RoutedPart(_digest("session", caller, session), SESSION_TOKENS)] if session else []
            for text in self._texts(path, caller, fields):
                parts.append(RoutedPart(_digest("text", caller, text), len(text) // CHARS_PER_TOKEN + 1))
        except Exception as error:  # a request may hold anything
            log.debug("Cannot find out what a request will read: %s", type(error).__name__)
            return ()
        return tuple(parts)

    def _is_worth_parsing(self, path: str, headers: Mapping[str, str], body: bytes) -> bool:
        """Whether the body is JSON that a replica would parse, and says what it will read."""
        is_json = body and headers.get("content-type", "").startswith("application/json")
        is_small = len(body) <= self._limits.json_bytes and count_values(body) <= self._limits.json_values
        return bool(is_json) and is_small and not path.startswith("/v1/collections/")

    def _texts(self, path: str, caller: str, fields: dict[str, Any]) -> Iterator[str]:
        """The texts of the documents that come with the request, then of the passages that it will retrieve."""
        for document in fields.get("documents") or () if path == "/v1/chat/completions" else ():
            yield str(document["text"])
        search = fields if path in ("/v1/ask", "/v1/compare") else fields.get("rag")
        folder = None if search is None else self._folder(caller, str(search.get("collection", DEFAULT_COLLECTION)))
        if search is None or folder is None:
            return
        query = Query(str(fields.get("question") or _last_question(fields)), condition_of(search.get("filter") or {}))
        with look_into(folder) as database:
            if database is not None:
                found = [number for number, _ in bm25(database, query, int(search.get("k", 6)))]
                yield from database.texts_of(found).values()

    def _folder(self, caller: str, collection: str) -> Path | None:
        """The folder of a caller's collection, or `None`."""
        principal = ANONYMOUS if not self._keys.exists else self._keys.principal(caller.removeprefix("Bearer ").strip())
        if principal is None:
            return None
        home = self._home / "tenants" / principal.tenant if principal.tenant else self._home
        key = CollectionFolders(home).key(collection)
        return None if key is None else key.path


def _session_of(path: str, headers: Mapping[str, str], fields: dict[str, Any]) -> str:
    """What identifies the conversation: its name, or its messages up to the first question; "" if there is none."""
    in_path = _SESSION.match(path)
    name = in_path[1] if in_path else fields.get("session_id") or headers.get("x-session-id")
    if name:
        return f"named {name}"
    users = _user_messages(fields)
    return json.dumps(fields["messages"][: users[0] + 1]) if users else ""


def _last_question(fields: dict[str, Any]) -> str:
    users = _user_messages(fields)
    return str(fields["messages"][users[-1]]["content"]) if users else ""


def _user_messages(fields: dict[str, Any]) -> list[int]:
    """The positions of the user's messages."""
    return [number for number, message in enumerate(fields.get("messages") or []) if message.get("role") == "user"]


def _digest(kind: str, caller: str, content: str) -> str:
    """A key that holds neither text nor API key. Different callers never share a key."""
    return hashlib.blake2b(json.dumps([kind, caller, content]).encode(), digest_size=16).hexdigest()
