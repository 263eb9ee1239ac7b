"""Which replica serves a request: pure functions of what the request names and how loaded the
replicas are.

Every key has one home among the replicas by rendezvous hash: a conversation meets its history
there, and when a replica leaves, only its own keys move. No replica gets more than a bounded share
of the requests in progress (consistent hashing with bounded loads); beyond it the least loaded one
serves. Nothing is remembered: any number of fronts agree.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

from ragkv.api.documents.collection_folders import DEFAULT_COLLECTION

# How many times the mean of the requests in progress a replica gets at most.
LOAD_FACTOR = 1.25
# Up to which size the front parses a body: all requests wait meanwhile.
PARSED_BYTES = 1 << 20
_SESSION = re.compile(r"/v1/sessions/([^/]+)")


def routing_key(path: str, headers: Mapping[str, str], body: bytes) -> str:
    """What requests that should meet have in common, as a digest; "" if the request names nothing
    or is invalid.

    The digest holds neither text nor API key. Different callers never share a key.
    """
    is_json = headers.get("content-type", "").startswith("application/json")
    is_parsed = (
        is_json and 0 < len(body) <= PARSED_BYTES and not path.startswith("/v1/collections/")
    )
    try:
        named = _named(path, json.loads(body) if is_parsed else {})
    except Exception:  # a request may hold anything; the replica will refuse it
        return ""
    caller = headers.get("authorization", "")
    return (
        hashlib.blake2b(json.dumps([caller, *named]).encode(), digest_size=16).hexdigest()
        if named
        else ""
    )


def _named(path: str, fields: dict[str, Any]) -> tuple[str, Any] | None:
    """The conversation by its name, else the documents of the request, else the first messages,
    else the collection.
    """
    in_path = _SESSION.match(path)
    if session := in_path[1] if in_path else fields.get("session_id"):
        return "session", session
    if documents := fields.get("documents"):
        return "documents", sorted(document["text"] for document in documents)
    messages = fields.get("messages") or []
    for number, message in enumerate(messages):
        # the messages up to the first question are the same in all turns
        if message["role"] == "user":
            return "messages", messages[: number + 1]
    return (
        ("collection", fields.get("collection", DEFAULT_COLLECTION)) if path == "/v1/ask" else None
    )


def rank(key: str, loads: Mapping[str, int]) -> list[str]:
    """The replicas, given with their requests in progress: the key's home if its load allows, then
    the least loaded.
    """
    names = sorted(loads, key=lambda name: (loads[name], name))
    if key and names:
        chosen = home(key, names)
        most = ceil(LOAD_FACTOR * (sum(loads.values()) + 1) / len(names))
        if loads[chosen] < most:
            return [chosen, *(name for name in names if name != chosen)]
    return names


def home(key: str, names: Iterable[str]) -> str:
    """The replica of the highest weight for `key` (rendezvous hash)."""
    return max(
        names, key=lambda name: hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest()
    )
