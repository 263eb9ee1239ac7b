"""Manifests on a Redis server, so that any replica can continue a conversation.

A turn begins with the newest state. It saves its own state before its answer is reported complete,
so the next request finds it on every replica. If two replicas answer turns of one conversation at
once, both compute, and the second one to end gets `SessionConflictError`; on one replica turns wait
for each other. If the state cannot be read, the request is refused, because an old state might be
wrong. A block that is in no tier is computed again.

A manifest is the same three lines of JSON as in a file (`manifest.py`). Next to it is a *version*,
a random word that changes with every write. A writer names the version that it read. If another
replica wrote meanwhile, nothing is written and `SessionConflictError` is raised. So no turn ever
overwrites another one. A log of keys tells all replicas which blocks and documents were deleted. No
value has a time to live, because `volatile-lru` might evict it. Expired conversations are deleted
when they are looked at.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ragkv.config import RedisConfig
from ragkv.errors import InputError, RemoteError, SessionConflictError, SessionUnavailableError
from ragkv.prompt.history import SessionState
from ragkv.sessions.manifest import (
    NOT_A_MANIFEST,
    ManifestVersionError,
    Summary,
    manifest_of,
    state_of,
)
from ragkv.sessions.session import Session
from ragkv.sessions.storage import Saved, SessionStorage, StoredState
from ragkv.store.entry import EntryKey, Identity
from ragkv.store.tiers import RemoteStats

from .health import Health
from .redis_client import RedisClient

DELETIONS = 1_000  # how many are kept in the log, for replicas that were offline
LOGGED = 100  # how many rows of the log of deletions come in one answer
# A manifest of more than `MANIFEST_BYTES` is damage, not a reason to allocate.
MANIFEST_BYTES = 64 * 1024**2
# `PATIENCE` times `timeout_s` is waited: without its state a conversation is refused, and late KV
# is only computed.
PATIENCE = 4
# The longest time between two probes of a server that is away: conversations
# wait for it.
PROBE_PAUSE_S = 2.0

REMEMBERED = 10_000  # The number of conversations whose last use is known here at most.
CLOCK_SKEW_S = 5.0  # by how much the clocks of replicas may differ
RESTORED = "the conversation is older than it was here: its server was restored"

T = TypeVar("T")

# A script is one step on the server. KEYS: the manifest, a hash; the summaries (id -> JSON); the
# log of deletions. The hash field of the version is called `edition`, as in all data written so
# far.

# `LOAD` takes the known version, and the most bytes that a manifest may have. It returns false if
# there is no manifest, {version} if that is the known one, and {version, manifest} otherwise.
LOAD = """
local version = redis.call('HGET', KEYS[1], 'edition')
if not version then return false end
if version == ARGV[1] then return {version} end
if redis.call('HSTRLEN', KEYS[1], 'data') > tonumber(ARGV[2]) then return {version, ''} end
return {version, redis.call('HGET', KEYS[1], 'data')}
"""
# `SAVE` takes: the version read or '', the new version, manifest, id, summary -> 1, or 0 if the
# version differs
SAVE = """
if (redis.call('HGET', KEYS[1], 'edition') or '') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'edition', ARGV[2], 'data', ARGV[3])
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
return 1
"""
# `DELETE` takes: the version read or '', id -> nothing; the blocks are added to the log, if the
# version does not differ
DELETE = f"""
if ARGV[1] ~= '' and redis.call('HGET', KEYS[1], 'edition') ~= ARGV[1] then return end
local summary = redis.call('HGET', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[2], ARGV[2])
if summary then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', {DELETIONS}, '*', 'keys', cjson.encode(cjson.decode(summary)['keys']))
end
"""


class RedisSessionStorage(SessionStorage):
    """The conversations of one tenant and model, from all replicas.

    Every method that reads or writes raises `SessionUnavailableError` if the server does not answer
    as it should. While its circuit breaker is open it does so at once; `probe` closes it.
    """

    shared = True

    def __init__(
        self, config: RedisConfig, base: Identity, vocabulary: int, secret: str | None = None
    ) -> None:
        """`base` is the engine's identity, whose `seen_digest` does not count. The model has
        `vocabulary` token ids.

        Does not connect yet.
        """
        model = replace(base, seen_digest="").to_json()
        digest = hashlib.blake2b(f"{model}{secret or ''}".encode(), digest_size=16).hexdigest()
        root = f"{config.prefix}:sessions:{digest}:"
        self._root = f"{root}m:"
        self._keys = (f"{root}summaries", f"{root}deletions")
        self._base = base
        self._vocabulary = vocabulary
        self._secret = secret
        # skips its own deletions: the entries may have been stored again since
        self._replica = secrets.token_hex(8)
        config = replace(config, timeout_s=PATIENCE * config.timeout_s)
        self._server = RedisClient(config)
        # when the states seen here were used, by id, to notice a server that was restored
        self._seen_at: dict[str, float] = {}
        self.health = Health("redis (conversations)", longest_pause_s=PROBE_PAUSE_S)

    def load(self, session_id: str, known: str | None) -> StoredState | None:
        found = self._call(lambda: self._run(LOAD, session_id, known or "", MANIFEST_BYTES))
        if found is None:
            self._saw(session_id, time.time())
            return StoredState(None, None) if known is not None else None
        if len(found) == 1:
            return None
        version = found[0].decode()
        try:
            state = state_of(session_id, found[1], self._base, self._secret)
            # without a secret anyone who can write to the server can forge them
            ids = state.history.token_ids
            if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
                raise ValueError("unknown token ids")
        except ManifestVersionError as error:
            raise SessionUnavailableError(
                f"Conversation {session_id!r} was written by another version of ragkv (format "
                f"{error}); "
                "ask a replica of that version, or delete the conversation."
            ) from error
        except NOT_A_MANIFEST as error:
            return StoredState(
                version,
                None,
                (f"the conversation's manifest is damaged ({error}): it starts empty",),
            )
        is_old = state.turns and state.used_at < self._seen_at.get(session_id, 0.0) - CLOCK_SKEW_S
        self._saw(session_id, state.used_at)
        return StoredState(version, state, (RESTORED,) if is_old else ())

    def save(
        self, session: Session, state: SessionState, is_over: Callable[[], bool] = lambda: False
    ) -> Saved:
        """See `SessionStorage`. Raises `SessionConflictError` if the version on the server is not
        the session's, and `InputError` for a state that is too large to be read again.

        If the server did not answer it may have this state.
        """
        session_id = session.session_id
        known = session.version
        summary = Summary.of(session_id, state, self._base)
        version = secrets.token_hex(8)
        data = manifest_of(summary, state, self._base, self._secret)
        if len(data) > MANIFEST_BYTES:  # `load` would call it damaged
            raise InputError(
                f"Conversation {session_id!r} would be {len(data)} bytes, and {MANIFEST_BYTES} are "
                "kept at most; this turn is not part of it. Begin another conversation."
            )
        arguments = known or "", version, data, session_id, summary.to_json()
        if not self._call(lambda: self._run(SAVE, session_id, *arguments)):
            raise SessionConflictError(
                f"Another replica changed conversation {session_id!r} meanwhile, or deleted it; "
                "this turn is not "
                "part of it. Ask again: it is answered on the newest state."
            )
        self._saw(session_id, state.used_at)
        return Saved(version)

    def delete(self, session_id: str, known: str | None = None) -> None:
        """See `SessionStorage`; the conversation's blocks are added to the log of deletions."""
        self._call(lambda: self._run(DELETE, session_id, known or "", session_id))

    def summaries(self, session_ids: Sequence[str] | None = None) -> Iterator[Summary]:
        """The summaries of all conversations, or of those of these ids."""
        client = self._server.client
        name = self._keys[0]
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
        self._call(
            lambda: self._server.client.xadd(
                self._keys[1], fields, maxlen=DELETIONS, approximate=True
            )
        )

    def deleted(self, since: str) -> tuple[str, list[EntryKey]]:
        """The position to ask from next time, and the keys of entries that others deleted after
        `since` ("0": all).
        """
        begin = f"({since}" if since != "0" else "-"
        rows = self._call(lambda: self._server.client.xrange(self._keys[1], begin, "+", LOGGED))
        keys: list[EntryKey] = []
        for _, fields in rows:
            if fields.get(b"by") != self._replica.encode():
                keys += _logged_keys(fields.get(b"keys", b""))
        return (rows[-1][0].decode() if rows else since), keys

    def stats(self) -> RemoteStats:
        return self.health.stats()

    def probe(self) -> None:
        """Ask a server that did not answer whether it does again, if it is time to."""
        self.health.probe(lambda: self._exchange(self._server.client.ping))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _saw(self, session_id: str, used_at: float) -> None:
        """Remember when a conversation's state was used."""
        if len(self._seen_at) >= REMEMBERED:
            self._seen_at.clear()
        self._seen_at[session_id] = used_at

    def _run(self, script: str, session_id: str, *arguments: Any) -> Any:
        return self._server.client.eval(script, 3, self._root + session_id, *self._keys, *arguments)

    def _call(self, action: Callable[[], T]) -> T:
        """What `action` returns, one request to the server. Raises `SessionUnavailableError` if it
        fails.
        """
        try:
            return self.health.call(lambda: self._exchange(action))
        except RemoteError as error:
            raise SessionUnavailableError(
                f"The state of conversations cannot be read or written ({error}). A state that "
                "may be old is never "
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
