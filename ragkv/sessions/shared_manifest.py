"""Manifests on a Redis server, so that a conversation goes on wherever its next turn lands.

The manifest is the same three lines of JSON as in a file (`manifest.py`), beside it an *edition*, a random word that
changes with every write. Who writes names the edition it read: if another replica wrote meanwhile, nothing is written
and `SessionConflictError` says so, so that no turn is ever lost to a later one. Deletions, of conversations and of
documents, are told to all replicas by a log of keys, so that none keeps what another was asked to forget. Nothing here
has a time to live of the server's, which under `volatile-lru` might evict it: what is idle for too long is deleted by
whichever replica looks next.
"""

import hashlib
import json
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

from .manifest import OtherVersionError, Summary, decoded, encoded

DELETIONS = 1_000  # of conversations, remembered for replicas that were away
SWEPT = 100  # conversations deleted at a time because they were idle

# KEYS: summaries (id -> JSON), expiries (id by ms), the log of deletions. ARGV[1]: what manifests' keys begin with
_BOOKS = f"""
local summaries, expiries, log, root = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function forget(id, keys)
  local there = redis.call('DEL', root .. id)
  redis.call('HDEL', summaries, id)
  redis.call('ZREM', expiries, id)
  if keys ~= '' then redis.call('XADD', log, 'MAXLEN', '~', {DELETIONS}, '*', 'keys', keys) end
  return there
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

# id, the edition known -> false where there is none, {edition} if it is that, else {edition, manifest}
LOAD = (
    _BOOKS
    + """
local id = ARGV[2]
if expired(id) then forget(id, keys_of(id)) end
local edition = redis.call('HGET', root .. id, 'edition')
if not edition then return false end
if edition == ARGV[3] then return {edition} end
return {edition, redis.call('HGET', root .. id, 'data')}
"""
)

# id, the edition read or '', the new one, manifest, summary, ms to live or 0 -> 1, or 0 if it is of another edition
SAVE = (
    _BOOKS
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

# id -> 1 if it was there; its blocks are in the log
DELETE = _BOOKS + "\nreturn forget(ARGV[2], keys_of(ARGV[2]))"

# how many at most -> how many were idle for too long and are no more
SWEEP = (
    _BOOKS
    + """
local idle = redis.call('ZRANGEBYSCORE', expiries, '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))
for _, id in ipairs(idle) do forget(id, keys_of(id)) end
return #idle
"""
)


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation as it stands for everybody."""

    version: str | None  # None: there is none
    conversation: Conversation | None  # None: there is none, or it could not be read
    note: str | None = None  # what its next report should say


class SharedManifests:
    """The conversations of one tenant and model, whichever replica served them. All methods are thread-safe."""

    def __init__(self, config: RedisConfig, base: Identity, secret: str | None = None) -> None:
        """`base` is the engine's identity, whatever its context. Connects to nothing yet."""
        whose = replace(base, context="").to_json()
        here = hashlib.blake2b(f"{whose}{secret or ''}".encode(), digest_size=16).hexdigest()
        root = f"{config.prefix}:sessions:{here}:"
        self._root, self._keys = f"{root}m:", (f"{root}summaries", f"{root}expiries", f"{root}deletions")
        self._base, self._secret = base, secret
        self._name = secrets.token_hex(8)  # in the log: what we deleted ourselves may have come back since
        self._server = RedisServer(config)

    def load(self, session_id: str, known: str | None) -> Found | None:
        """What is there, or `None` if it still is of the edition `known`. Raises `SessionUnavailableError`."""
        answer = self._run(LOAD, session_id, known or "")
        if answer is None:
            return Found(None, None) if known is not None else None
        if len(answer) == 1:
            return None
        edition = answer[0].decode()
        try:
            return Found(edition, decoded(session_id, answer[1], self._secret))
        except OtherVersionError as error:
            raise SessionUnavailableError(
                f"Conversation {session_id!r} was written by another version of ragkv (format {error}); "
                "ask a replica of that version, or delete the conversation."
            ) from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return Found(edition, None, f"the conversation's manifest is damaged ({error}): it starts empty")

    def save(self, session_id: str, conversation: Conversation, known: str | None, ttl_s: float | None) -> str:
        """Write a conversation down; its new edition. `known` is the edition it goes on from, `None` for a new one.

        Raises `SessionConflictError` if there is another by now, and `SessionUnavailableError`; then the one before
        stands, or, if no answer came, this one.
        """
        summary = Summary.of(session_id, conversation, self._base)
        edition, data = secrets.token_hex(8), encoded(summary, conversation, self._base, self._secret)
        ttl_ms = 0 if ttl_s is None else max(1, round(ttl_s * 1000))
        if not self._run(SAVE, session_id, known or "", edition, data, summary.to_json(), ttl_ms):
            raise SessionConflictError(
                f"Another replica went on with conversation {session_id!r} meanwhile, or deleted it; this turn is not "
                "part of it. Ask again: it is answered on the newest state."
            )
        return edition

    def delete(self, session_id: str) -> bool:
        """Remove a conversation and tell all replicas of its blocks; whether it was there."""
        return bool(self._run(DELETE, session_id))

    def sweep(self) -> int:
        """Delete some of the conversations that were idle for too long; how many."""
        return int(self._run(SWEEP, SWEPT))

    def ids(self) -> tuple[str, ...]:
        """Of all conversations."""
        with self._available():
            return tuple(name.decode() for name in self._server.client.hkeys(self._keys[0]))

    def summaries(self) -> Iterator[Summary]:
        """Of all conversations."""
        with self._available():
            rows = self._server.client.hvals(self._keys[0])
        for row in rows:
            try:
                yield Summary.from_json(row)
            except (ValueError, KeyError, TypeError):
                continue  # whoever asks for that conversation is told

    def announce(self, keys: Sequence[str]) -> None:
        """Tell all replicas that the entries of these keys were deleted."""
        with self._available():
            fields = {"keys": json.dumps(list(keys)), "by": self._name}
            self._server.client.xadd(self._keys[2], fields, maxlen=DELETIONS, approximate=True)

    def deleted(self, since: str) -> tuple[str, list[str]]:
        """Keys of entries that were deleted since, and where to ask from the next time. From the start: "0"."""
        with self._available():
            rows = self._server.client.xrange(self._keys[2], f"({since}" if since != "0" else "-", "+")
        others = [fields[b"keys"] for _, fields in rows if fields.get(b"by", b"").decode() != self._name]
        keys = [key for told in others for key in json.loads(told)]
        return (rows[-1][0].decode() if rows else since), keys

    def close(self) -> None:
        """Let go of the connections. Twice is harmless."""
        self._server.close()

    def _run(self, script: str, *arguments: Any) -> Any:
        with self._available():
            return self._server.client.eval(script, len(self._keys), *self._keys, self._root, *arguments)

    @contextmanager
    def _available(self) -> Iterator[None]:
        """One exchange with the server."""
        try:
            with self._server.call():
                yield
        except RemoteError as error:
            raise SessionUnavailableError(
                f"The state of conversations cannot be read or written ({error}). Nothing is answered on a state that "
                "may be old: ask again, or ask without a conversation."
            ) from error


__all__ = ["Found", "SharedManifests"]
