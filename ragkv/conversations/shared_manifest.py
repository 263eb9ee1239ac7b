"""Manifests on a Redis server, so that any replica can continue a conversation.

A manifest is the same three lines of JSON as in a file (`manifest.py`). Next to it is a *version*, a random word that
changes with every write. A writer names the version it read: if another replica wrote meanwhile, nothing is written
and `SessionConflictError` is raised, so no turn ever overwrites another one. A log of keys tells all replicas which
blocks and documents were deleted, so that no replica keeps what another one was asked to delete. No value has a time to
live on the server, because `volatile-lru` might evict it: the next replica that looks deletes what was idle too long.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ragkv.config import RedisConfig
from ragkv.errors import RemoteError, SessionConflictError, SessionUnavailableError
from ragkv.prompt.history import Conversation
from ragkv.store import EntryKey, Identity
from ragkv.store.remote.health import Health
from ragkv.store.remote.redis_server import RedisServer

from .manifest import NOT_A_MANIFEST, ManifestVersionError, Summary, decode, encode

DELETIONS = 1_000  # kept in the log, for replicas that were offline
SWEPT = 100  # idle conversations deleted at a time
LOGGED = 100  # rows of the log of deletions in one answer
MANIFEST_BYTES = 64 * 1024**2  # a larger manifest is damage, not a reason to allocate
PATIENCE = 4  # times `timeout_s`: without its state a conversation is refused, while KV that is late is computed
PROBE_PAUSE_S = 2.0  # the longest between two probes of a server that is away: conversations wait for it

T = TypeVar("T")

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

# id, the known version, the most bytes of a manifest
# -> false if there is no manifest, {version} if it is the known one, else {version, manifest}
LOAD = (
    _COMMON
    + """
local id = ARGV[2]
if expired(id) then forget(id, keys_of(id)) end
local version = redis.call('HGET', root .. id, 'edition')
if not version then return false end
if version == ARGV[3] then return {version} end
if redis.call('HSTRLEN', root .. id, 'data') > tonumber(ARGV[4]) then return {version, ''} end
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
    """The conversations of one tenant and model, from all replicas. All methods are thread-safe.

    Every method that reads or writes raises `SessionUnavailableError` if the server does not answer as it should. While
    its circuit breaker is open it does so at once; `probe` closes it.
    """

    def __init__(self, config: RedisConfig, base: Identity, secret: str | None = None) -> None:
        """`base` is the engine's identity; its context does not count. Does not connect yet."""
        model = replace(base, context="").to_json()
        digest = hashlib.blake2b(f"{model}{secret or ''}".encode(), digest_size=16).hexdigest()
        root = f"{config.prefix}:sessions:{digest}:"
        self._root, self._keys = f"{root}m:", (f"{root}summaries", f"{root}expiries", f"{root}deletions")
        self._base, self._secret = base, secret
        self._replica = secrets.token_hex(8)  # skips its own deletions: the entries may have been stored again since
        config = replace(config, timeout_s=PATIENCE * config.timeout_s)
        self._server = RedisServer(config)
        self.health = Health("redis (conversations)", config.timeout_s, longest_pause_s=PROBE_PAUSE_S)

    def load(self, session_id: str, known: str | None) -> SharedState | None:
        """The state on the server, or `None` if its version still is `known`."""
        found = self._call(lambda: self._versioned(self._run(LOAD, session_id, known or "", MANIFEST_BYTES)))
        if found is None:
            return SharedState(None, None) if known is not None else None
        version, data = found
        if data is None:
            return None
        try:
            return SharedState(version, decode(session_id, data, self._base, self._secret))
        except ManifestVersionError as error:
            raise SessionUnavailableError(
                f"Conversation {session_id!r} was written by another version of ragkv (format {error}); "
                "ask a replica of that version, or delete the conversation."
            ) from error
        except NOT_A_MANIFEST as error:
            return SharedState(version, None, f"the conversation's manifest is damaged ({error}): it starts empty")

    def save(self, session_id: str, conversation: Conversation, known: str | None, ttl_s: float | None) -> str:
        """Save a conversation; returns its new version. `known` is the version it was read as, `None` for a new one.

        Raises `SessionConflictError` if the version on the server differs. After an error the server has the previous
        state; if the server did not answer it may have this one.
        """
        summary = Summary.of(session_id, conversation, self._base)
        version, data = secrets.token_hex(8), encode(summary, conversation, self._base, self._secret)
        ttl_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        arguments = (session_id, known or "", version, data, summary.to_json(), ttl_ms)
        if not self._call(lambda: self._run(SAVE, *arguments)):
            raise SessionConflictError(
                f"Another replica changed conversation {session_id!r} meanwhile, or deleted it; this turn is not "
                "part of it. Ask again: it is answered on the newest state."
            )
        return version

    def delete(self, session_id: str) -> bool:
        """Delete a conversation and add its blocks to the log of deletions; returns whether it existed."""
        return bool(self._call(lambda: self._run(DELETE, session_id)))

    def sweep(self) -> int:
        """Delete some of the conversations that were idle for too long; returns how many."""
        return self._call(lambda: int(self._run(SWEEP, SWEPT)))

    def ids(self) -> tuple[str, ...]:
        """The ids of all conversations."""
        return self._call(
            lambda: tuple(name.decode(errors="replace") for name in self._server.client.hkeys(self._keys[0]))
        )

    def summaries(self, session_ids: Sequence[str] | None = None) -> Iterator[Summary]:
        """The summaries of all conversations, or of those of these ids."""
        client, name = self._server.client, self._keys[0]
        if session_ids is None:
            rows = self._call(lambda: client.hvals(name))
        else:
            rows = self._call(lambda: client.hmget(name, list(session_ids))) if session_ids else []
        for row in rows:
            try:
                if row is not None:
                    yield Summary.from_json(row)
            except NOT_A_MANIFEST:
                continue  # `load` reports it to the caller that asks for this conversation

    def announce(self, keys: Sequence[EntryKey]) -> None:
        """Tell all replicas that the entries of these keys were deleted."""
        fields = {"keys": json.dumps([key.to_text() for key in keys]), "by": self._replica}
        self._call(lambda: self._server.client.xadd(self._keys[2], fields, maxlen=DELETIONS, approximate=True))

    def deleted(self, since: str) -> tuple[str, list[EntryKey]]:
        """The position to ask from next time, and the keys of entries that others deleted after `since` ("0": all)."""
        begin = f"({since}" if since != "0" else "-"
        rows = self._call(lambda: self._server.client.xrange(self._keys[2], begin, "+", LOGGED))
        keys: list[EntryKey] = []
        for _, fields in rows:
            if fields.get(b"by") != self._replica.encode():
                keys += _logged_keys(fields.get(b"keys", b""))
        return (rows[-1][0].decode() if rows else since), keys

    def probe(self) -> None:
        """Ask a server that did not answer whether it does again, if it is time to."""
        self.health.probe(lambda: self._exchange(self._server.client.ping))

    def close(self) -> None:
        """Close the connections. Twice is harmless."""
        self._server.close()

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._server.client.eval(script, len(self._keys), *self._keys, self._root, *arguments)

    def _versioned(self, answer: Any) -> tuple[str, bytes | None] | None:
        """What `LOAD` returned; `None` if there is no manifest."""
        return None if answer is None else (answer[0].decode(), answer[1] if len(answer) > 1 else None)

    def _call(self, action: Callable[[], T]) -> T:
        """What `action` returns, one request to the server. Raises `SessionUnavailableError` if it fails."""
        try:
            return self.health.call(lambda: self._exchange(action), brief=False)  # late is better than refused
        except RemoteError as error:
            raise SessionUnavailableError(
                f"The state of conversations cannot be read or written ({error}). A state that may be old is never "
                "used: ask again, or ask without a conversation."
            ) from error

    def _exchange(self, action: Callable[[], T]) -> T:
        with self._server.call():
            return action()


def _logged_keys(row: bytes) -> list[EntryKey]:
    """The keys in a row of the log of deletions; none if it is no such row."""
    try:
        found = json.loads(row)
    except (ValueError, RecursionError):
        return []
    texts = [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
    return [key for text in texts if (key := EntryKey.from_text(text)) is not None]


__all__ = ["SharedState", "SharedManifests"]
