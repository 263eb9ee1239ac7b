"""Manifests on a Redis server, so that any replica can continue a conversation.

A manifest is the same three lines of JSON as in a file (`manifest.py`). Next to it is a *version*, a random word that
changes with every write. A writer names the version it read: if another replica wrote meanwhile, nothing is written
and `SessionConflictError` is raised, so no turn ever overwrites another one. A log of keys tells all replicas which
blocks and documents were deleted, so that no replica keeps what another one was asked to delete. No value has a time to
live on the server, because `volatile-lru` might evict it: the next replica that looks deletes what was idle too long.
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ragkv.config import RedisConfig
from ragkv.errors import RemoteError, SessionConflictError, SessionUnavailableError
from ragkv.history import Conversation
from ragkv.store import Identity
from ragkv.store.remote.redis_server import RedisServer

from .manifest import OtherVersionError, Summary, decode, encode

log = logging.getLogger(__name__)

DELETIONS = 1_000  # kept in the log, for replicas that were offline
SWEPT = 100  # idle conversations deleted at a time

# KEYS: summaries (id -> JSON), expiries (id by ms), the log of deletions. ARGV[1]: the start of every manifest's key.
# The hash field of the version is called `edition`, as in all data written so far.
_COMMON = f"""
local summaries, expiries, log, root = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function forget(id, keys)
  local existed = redis.call('DEL', root .. id)
  redis.call('HDEL', summaries, id)
  redis.call('ZREM', expiries, id)
  if keys ~= '' then redis.call('XADD', log, 'MAXLEN', '~', {DELETIONS}, '*', 'keys', keys) end
  return existed
end
local function keys_of(id)
  local summary = redis.call('HGET', summaries, id)
  return summary and cjson.encode(cjson.decode(summary)['keys']) or ''
end
local function expired(id)
  local at = redis.call('ZSCORE', expiries, id)
  return at and tonumber(at) <= now
end
"""

# id, the known version -> false if there is no manifest, {version} if it is the known one, else {version, manifest}
LOAD = (
    _COMMON
    + """
local id = ARGV[2]
if expired(id) then forget(id, keys_of(id)) end
local version = redis.call('HGET', root .. id, 'edition')
if not version then return false end
if version == ARGV[3] then return {version} end
return {version, redis.call('HGET', root .. id, 'data')}
"""
)

# id, the version read or '', the new version, manifest, summary, ms to live or 0 -> 1, or 0 if the version differs
SAVE = (
    _COMMON
    + """
local id, ttl = ARGV[2], tonumber(ARGV[7])
if expired(id) then forget(id, keys_of(id)) end
if (redis.call('HGET', root .. id, 'edition') or '') ~= ARGV[3] then return 0 end
redis.call('HSET', root .. id, 'edition', ARGV[4], 'data', ARGV[5])
redis.call('HSET', summaries, id, ARGV[6])
if ttl > 0 then redis.call('ZADD', expiries, now + ttl, id) else redis.call('ZREM', expiries, id) end
return 1
"""
)

# id -> 1 if it existed; its blocks are added to the log
DELETE = _COMMON + "\nreturn forget(ARGV[2], keys_of(ARGV[2]))"

# how many at most -> how many were deleted because they were idle for too long
SWEEP = (
    _COMMON
    + """
local idle = redis.call('ZRANGEBYSCORE', expiries, '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))
for _, id in ipairs(idle) do forget(id, keys_of(id)) end
return #idle
"""
)


@dataclass(frozen=True, slots=True)
class SharedState:
    """A conversation as it is on the server."""

    version: str | None  # None: there is no manifest
    conversation: Conversation | None  # None: there is no manifest, or it could not be read
    note: str | None = None  # for the report of the next turn


class SharedManifests:
    """The conversations of one tenant and model, from all replicas. All methods are thread-safe."""

    def __init__(self, config: RedisConfig, base: Identity, secret: str | None = None) -> None:
        """`base` is the engine's identity; its context does not count. Does not connect yet."""
        model = replace(base, context="").to_json()
        digest = hashlib.blake2b(f"{model}{secret or ''}".encode(), digest_size=16).hexdigest()
        root = f"{config.prefix}:sessions:{digest}:"
        self._root, self._keys = f"{root}m:", (f"{root}summaries", f"{root}expiries", f"{root}deletions")
        self._base, self._secret = base, secret
        self._replica = secrets.token_hex(8)  # skips its own deletions: the entries may have been stored again since
        self._server = RedisServer(config)

    def load(self, session_id: str, known: str | None) -> SharedState | None:
        """The state on the server, or `None` if its version still is `known`. Raises `SessionUnavailableError`."""
        answer = self._run(LOAD, session_id, known or "")
        if answer is None:
            return SharedState(None, None) if known is not None else None
        if len(answer) == 1:
            return None
        version = answer[0].decode()
        try:
            return SharedState(version, decode(session_id, answer[1], self._secret))
        except OtherVersionError as error:
            raise SessionUnavailableError(
                f"Conversation {session_id!r} was written by another version of ragkv (format {error}); "
                "ask a replica of that version, or delete the conversation."
            ) from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return SharedState(version, None, f"the conversation's manifest is damaged ({error}): it starts empty")

    def save(self, session_id: str, conversation: Conversation, known: str | None, ttl_s: float | None) -> str:
        """Save a conversation; returns its new version. `known` is the version it was read as, `None` for a new one.

        Raises `SessionConflictError` if the version on the server differs, and `SessionUnavailableError`. Then the
        server has the previous state; if the server did not answer it may have this one.
        """
        summary = Summary.of(session_id, conversation, self._base)
        version, data = secrets.token_hex(8), encode(summary, conversation, self._base, self._secret)
        ttl_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        if not self._run(SAVE, session_id, known or "", version, data, summary.to_json(), ttl_ms):
            raise SessionConflictError(
                f"Another replica changed conversation {session_id!r} meanwhile, or deleted it; this turn is not "
                "part of it. Ask again: it is answered on the newest state."
            )
        return version

    def delete(self, session_id: str) -> bool:
        """Delete a conversation and add its blocks to the log of deletions; returns whether it existed."""
        return bool(self._run(DELETE, session_id))

    def sweep(self) -> int:
        """Delete some of the conversations that were idle for too long; returns how many."""
        return int(self._run(SWEEP, SWEPT))

    def ids(self) -> tuple[str, ...]:
        """The ids of all conversations."""
        with self._available():
            return tuple(name.decode() for name in self._server.client.hkeys(self._keys[0]))

    def summaries(self) -> Iterator[Summary]:
        """The summaries of all conversations."""
        with self._available():
            rows = self._server.client.hvals(self._keys[0])
        for row in rows:
            try:
                yield Summary.from_json(row)
            except (ValueError, KeyError, TypeError):
                continue  # `load` reports it to the caller that asks for this conversation

    def announce(self, keys: Sequence[str]) -> None:
        """Tell all replicas that the entries of these keys were deleted.

        If the server is unavailable that is logged: the other replicas keep the entries until they sweep the corpus.
        """
        fields = {"keys": json.dumps(list(keys)), "by": self._replica}
        try:
            with self._available():
                self._server.client.xadd(self._keys[2], fields, maxlen=DELETIONS, approximate=True)
        except SessionUnavailableError as error:
            log.warning("Other replicas may keep %d deleted entries: %s", len(keys), error)

    def deleted(self, since: str) -> tuple[str, list[str]]:
        """The position to ask from next time, and the keys of entries that others deleted after `since` ("0": all)."""
        with self._available():
            rows = self._server.client.xrange(self._keys[2], f"({since}" if since != "0" else "-", "+")
        others = [fields[b"keys"] for _, fields in rows if fields.get(b"by", b"").decode() != self._replica]
        keys = [key for logged in others for key in json.loads(logged)]
        return (rows[-1][0].decode() if rows else since), keys

    def close(self) -> None:
        """Close the connections. Twice is harmless."""
        self._server.close()

    def _run(self, script: str, *arguments: Any) -> Any:
        with self._available():
            return self._server.client.eval(script, len(self._keys), *self._keys, self._root, *arguments)

    @contextmanager
    def _available(self) -> Iterator[None]:
        """One request to the server. Raises `SessionUnavailableError` if it fails."""
        try:
            with self._server.call():
                yield
        except RemoteError as error:
            raise SessionUnavailableError(
                f"The state of conversations cannot be read or written ({error}). A state that may be old is never "
                "used: ask again, or ask without a conversation."
            ) from error


__all__ = ["SharedState", "SharedManifests"]
