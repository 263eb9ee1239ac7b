"""Entries on a Redis or Valkey server (redis-py), each a hash whose fields are the entry's values.

The server bounds them by `maxmemory`. It evicts whole entries, and lets whole entries expire,
because an entry is one name there. Nothing is retried: an error is a miss, and the circuit breaker
judges it.
"""

import contextlib
from collections.abc import Iterator, Sequence

from ragkv.config import RedisConfig
from ragkv.errors import RemoteError
from ragkv.store.entry import EntryKey
from ragkv.store.record import Bytes
from ragkv.store.tiers.stats import TierKind

from .connector import HEAD_BYTES, Connector
from .redis_client import ANSWER_BYTES, FullError, RedisClient

_PAGE = 500  # An answer lists about so many keys.
_OVERHEAD_BYTES = 64 * 1024  # An answer may have so much around a value, or of another answer.
_WRITING_MS = 3600 * 1000  # What a writer that was killed left behind is deleted after this time.

# A Lua script is one step on the server, and cuts a value there: no more than its part is sent.
# KEYS[1]: the entry. Most bytes of the head, milliseconds to live or 0 -> the head's beginning, or
# false. An incomplete entry has no head.
_FIND = """
local head = redis.call('HGET', KEYS[1], '0')
if head and ARGV[2] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return head and string.sub(head, 1, ARGV[1])
"""
# Layer group, the part's first byte and the byte behind it -> the part, or false
_GET = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
return value and string.sub(value, ARGV[2] + 1, ARGV[3])
"""
# KEYS[1]: the entry. Content digest, with which a head begins, or '' -> 1 if the head was there
_DROP = """
local head, digest = redis.call('HGET', KEYS[1], '0'), ARGV[1]
if digest ~= '' and not (head and string.sub(head, 1, #digest) == digest) then
  return 0  -- gone, or another replica has written it anew
end
redis.call('UNLINK', KEYS[1])
return head and 1 or 0
"""


class RedisConnector(Connector):
    """One tenant's entries on one server."""

    kind = TierKind.REDIS

    def __init__(self, config: RedisConfig, tenant: str) -> None:
        """Connects to nothing yet. `tenant` is the tenant's part of the names on the server."""
        self._ttl_ms = 0 if config.ttl_s is None else max(1, round(config.ttl_s * 1000))
        self._root = f"{config.prefix}:{tenant}:e:"
        self._server = RedisClient(config)
        self.client = self._server.client
        self.call = self._server.call

    def find(self, keys: Sequence[EntryKey]) -> list[Bytes | None]:
        with self.call(), self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.eval(_FIND, 1, self.name_of(key), HEAD_BYTES, self._ttl_ms)
            return [start or None for start in pipeline.execute()]

    def get(
        self, key: EntryKey, layer_group: int, start: int = 0, stop: int | None = None
    ) -> Bytes | None:
        most = ANSWER_BYTES if stop is None else stop - start + _OVERHEAD_BYTES
        with self.call(most):
            part: bytes = self.client.eval(
                _GET, 1, self.name_of(key), layer_group, start, -1 if stop is None else stop
            )
        return part or None

    def exists(self, key: EntryKey) -> bool:
        with self.call():
            return bool(self.client.hexists(self.name_of(key), 0))

    def put(self, key: EntryKey, values: Sequence[Bytes]) -> bool:
        name = self.name_of(key)
        try:
            for layer_group in range(len(values) - 1, 0, -1):
                with self.call(), self.client.pipeline(transaction=True) as pipeline:
                    pipeline.hset(name, layer_group, values[layer_group])
                    pipeline.pexpire(name, _WRITING_MS)
                    pipeline.execute()
            with self.call(), self.client.pipeline(transaction=True) as pipeline:  # the head last
                pipeline.hset(name, 0, values[0])
                pipeline.pexpire(name, self._ttl_ms) if self._ttl_ms else pipeline.persist(name)
                pipeline.execute()
        except RemoteError as error:
            with contextlib.suppress(RemoteError):  # if this fails too, the rest expires
                self.delete(key)
            # not a fault: the entry is not stored, and reads go on
            if isinstance(error, FullError):
                return False
            raise
        return True

    def delete(self, key: EntryKey, content_digest: bytes | None = None) -> bool:
        with self.call():
            return bool(self.client.eval(_DROP, 1, self.name_of(key), content_digest or b""))

    def all_keys(self) -> Iterator[EntryKey]:
        """See `Connector.all_keys`; this looks at every name on the server."""
        pattern = self._root.replace("[", "\\[") + "*"
        cursor = 0
        while True:
            with self.call():
                cursor, names = self.client.scan(cursor, match=pattern, count=_PAGE)
            texts = [name[len(self._root) :].decode(errors="replace") for name in names]
            yield from (key for text in texts if (key := EntryKey.from_text(text)) is not None)
            if not cursor:
                return

    def reset(self) -> None:
        self._server.reset()

    def close(self) -> None:
        self._server.close()

    def name_of(self, key: EntryKey) -> str:
        """The name of an entry on the server."""
        return f"{self._root}{key.to_text()}"
