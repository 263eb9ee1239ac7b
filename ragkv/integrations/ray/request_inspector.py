"""Finds out what KV a request will read, so that a router can choose the replica that has it.

The conversation has a name or is identified by its first messages. Documents come with the request, or are searched in
the shared index (read-only, BM25), which finds most of what the replica will find. The result is a hint: parts that are
not found, or not in time, are left out, and no request fails because of it.
"""

import hashlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ragkv.api import ANONYMOUS, COLLECTION_NAME, DEFAULT_COLLECTION, KeyRing, ServeConfig
from ragkv.api.middleware.body import count_values
from ragkv.retrieval import Index

from .replica_routing import RoutedPart, RoutingRequest

log = logging.getLogger(__name__)

CHARS_PER_TOKEN = 4  # `CHARS_PER_TOKEN` is an estimate: routers weigh parts and need no exact counts.
OPEN_INDEXES = 32  # `OPEN_INDEXES` is how many indexes stay open.
SESSION_TOKENS = 2_000  # `SESSION_TOKENS` is the weight of a conversation's history against chunks.
_SESSION = re.compile(r"/v1/sessions/([^/]+)")


class RequestInspector:
    """Makes the `RoutingRequest` of an HTTP request. Not thread-safe: call it from one thread."""

    def __init__(self, config: ServeConfig) -> None:
        self._home = Path(config.home)
        self._limits = config.limits
        self._keys = KeyRing(config.keys_path)
        self._indexes: OrderedDict[Path, tuple[int, Index]] = OrderedDict()  # least recently used first

    def inspect(self, path: str, headers: Mapping[str, str], body: bytes) -> RoutingRequest:
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
            return RoutingRequest()
        return RoutingRequest(parts[0].key if session else "", tuple(parts))

    def _is_worth_parsing(self, path: str, headers: Mapping[str, str], body: bytes) -> bool:
        """Whether the body is JSON that a replica would parse, and says what it will read."""
        is_json = body and headers.get("content-type", "").startswith("application/json")
        is_small = len(body) <= self._limits.json_bytes and count_values(body) <= self._limits.json_values
        return bool(is_json) and is_small and not path.startswith("/v1/collections/")

    def close(self) -> None:
        """Close the indexes. May be called twice."""
        while self._indexes:
            self._indexes.popitem()[1][1].close()

    def _texts(self, path: str, caller: str, fields: dict[str, Any]) -> Iterator[str]:
        """The texts of the documents that come with the request, then of the passages that it will retrieve."""
        for document in fields.get("documents") or () if path == "/v1/chat/completions" else ():
            yield str(document["text"])
        search = fields if path in ("/v1/ask", "/v1/compare") else fields.get("rag")
        if search is None:
            return
        index = self._index(caller, str(search.get("collection", DEFAULT_COLLECTION)))
        if index is not None:
            question = str(fields.get("question") or _last_question(fields))
            for hit in index.search(question, int(search.get("k", 6)), retriever="bm25", where=search.get("filter")):
                yield hit.passage.text

    def _index(self, caller: str, collection: str) -> Index | None:
        """The index of a caller's collection, or `None`."""
        principal = ANONYMOUS if not self._keys.exists else self._keys.principal(caller.removeprefix("Bearer ").strip())
        if principal is None or not COLLECTION_NAME.fullmatch(collection):
            return None
        home = self._home / "tenants" / principal.tenant if principal.tenant else self._home
        directory = home / "collections" / collection
        if collection == DEFAULT_COLLECTION and not directory.exists() and not principal.tenant:
            directory = home / "index"
        try:
            inode = (directory / "index.sqlite").stat().st_ino
        except OSError:
            return None
        known_inode, index = self._indexes.pop(directory, (None, None))
        if index is None or known_inode != inode:  # else the collection was deleted and made anew
            if index is not None:
                index.close()
            index = Index(directory, read_only=True)
        self._indexes[directory] = inode, index
        if len(self._indexes) > OPEN_INDEXES:
            self._indexes.popitem(last=False)[1][1].close()
        return index


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
