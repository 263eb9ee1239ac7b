"""What a request will read, told from the request alone, so that it can be sent where that lies.

Its conversation is named, or known by how it begins; its documents come with it, or are looked for in the shared index,
read-only and by BM25, which finds most of what the replica will find. All of it is a hint: what cannot be told, or not
in time, is left out, and no request fails for it.
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
from ragkv.retrieval import Index
from ragkv.scheduling.replica_routing import Part, RoutingRequest

log = logging.getLogger(__name__)

CHARS_A_TOKEN = 4  # roughly; weights, not counts
OPEN_INDEXES = 32
_SESSION = re.compile(r"/v1/sessions/([^/]+)")


class Asks:
    """From requests to what a router knows of them. Called from one thread."""

    def __init__(self, config: ServeConfig) -> None:
        self._home, self._session_tokens = Path(config.home), config.cluster.session_tokens
        self._keys = KeyRing(config.keys_path)
        self._indexes: OrderedDict[Path, tuple[int, Index]] = OrderedDict()

    def of(self, path: str, headers: Mapping[str, str], body: bytes) -> RoutingRequest:
        """The request as a router sees it."""
        who = headers.get("authorization", "")
        try:
            asked = json.loads(body) if body and headers.get("content-type", "").startswith("application/json") else {}
            asked = asked if isinstance(asked, dict) else {}
            session = _session_of(path, headers, asked)
            parts = [Part(_digest("session", who, session), self._session_tokens)] if session else []
            parts += [_part(who, text) for text in self._texts(path, who, asked)]
        except Exception as error:  # whatever was sent, it is the replica's to refuse
            log.debug("A request told nothing of what it will read: %s", type(error).__name__)
            return RoutingRequest()
        return RoutingRequest(parts[0].key if session else "", tuple(parts))

    def close(self) -> None:
        """Close the indexes. Twice is harmless."""
        while self._indexes:
            self._indexes.popitem()[1][1].close()

    def _texts(self, path: str, who: str, asked: dict[str, Any]) -> Iterator[str]:
        for document in asked.get("documents") or () if path == "/v1/chat/completions" else ():
            yield str(document["text"])
        look = asked if path in ("/v1/ask", "/v1/compare") else asked.get("rag")
        if (
            look is not None
            and (index := self._index(who, str(look.get("collection", DEFAULT_COLLECTION)))) is not None
        ):
            question = str(asked.get("question") or _said(asked, last=True))
            for hit in index.search(question, int(look.get("k", 6)), retriever="bm25", where=look.get("filter")):
                yield hit.passage.text

    def _index(self, who: str, name: str) -> Index | None:
        """The index of a caller's collection, if there is one."""
        principal = ANONYMOUS if not self._keys.exists else self._keys.principal(who.removeprefix("Bearer ").strip())
        if principal is None or not COLLECTION_NAME.fullmatch(name):
            return None
        home = self._home / "tenants" / principal.tenant if principal.tenant else self._home
        directory = home / "collections" / name
        if name == DEFAULT_COLLECTION and not directory.exists() and not principal.tenant:
            directory = home / "index"
        try:
            stamp = (directory / "index.sqlite").stat().st_ino
        except OSError:
            return None
        known = self._indexes.get(directory)
        if known is not None and known[0] == stamp:
            self._indexes.move_to_end(directory)
            return known[1]
        if known is not None:
            known[1].close()
        index = Index(directory, read_only=True)
        self._indexes[directory] = stamp, index
        if len(self._indexes) > OPEN_INDEXES:
            self._indexes.popitem(last=False)[1][1].close()
        return index


def _session_of(path: str, headers: Mapping[str, str], asked: dict[str, Any]) -> str:
    """The conversation's name; of one that has none, how it begins; "" where there is none."""
    in_path = _SESSION.match(path)
    named = in_path[1] if in_path else asked.get("session_id") or headers.get("x-session-id")
    return f"named {named}" if named else _said(asked, last=False)


def _said(asked: dict[str, Any], last: bool) -> str:
    """What the user said last, or all up to what was said first."""
    messages = asked.get("messages") or []
    users = [number for number, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return ""
    return str(messages[users[-1]]["content"]) if last else json.dumps(messages[: users[0] + 1])


def _part(who: str, text: str) -> Part:
    return Part(_digest("text", who, text), len(text) // CHARS_A_TOKEN + 1)


def _digest(kind: str, who: str, what: str) -> str:
    """What is remembered of it: no text, no key. Callers have what is theirs."""
    whole = json.dumps([kind, who, what]).encode()
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


__all__ = ["Asks"]
