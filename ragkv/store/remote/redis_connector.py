"""Entries on a Redis or Valkey server (redis-py), bounded and counted there (`redis_scripts.py`).

Nothing is retried: an error is a miss, and the circuit breaker judges it.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

from ragkv.config import RedisConfig
from ragkv.errors import RemoteError

from ..key import EntryKey
from ..record import CHECKSUM_START, Bytes
from ..tiers.base import TierKind
from . import redis_scripts as scripts
from .connector import HEAD_BYTES, Connector, PutResult, Usage
from .redis_server import ANSWER_BYTES, FullError, RedisServer

_PAGE = 500  # An answer lists about so many keys.
_OVERHEAD_BYTES = 64 * 1024  # An answer may have so much around a value, or of another answer.
_MAX_GROUPS = 4096  # At most so many layer groups of one entry are counted.


class RedisConnector(Connector):
    """One tenant's entries on one server."""

    kind = TierKind.REDIS

    def __init__(self, config: RedisConfig, tenant: str) -> None:
        """Connects to nothing yet. `tenant` is the tenant's part of the names on the server."""
        self.capacity_bytes = config.max_bytes
        self._ttl_ms = 0 if config.ttl_s is None else max(1, round(config.ttl_s * 1000))
        base = f"{config.prefix}:{tenant}:"
        self._root, self._audited = f"{base}v:", f"{base}audited"
        self._accounting = (f"{base}sizes", f"{base}uses")
        self._server = RedisServer(config)
        self._client, self._call = self._server.client, self._server.call

    def find(self, keys: Sequence[EntryKey]) -> list[Bytes | None]:
        with self._call(), self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                self._script(pipeline, scripts.FIND, key, HEAD_BYTES, self._ttl_ms)
            return [start or None for start in pipeline.execute()]

    def get(self, key: EntryKey, layer_group: int, start: int = 0, stop: int | None = None) -> Bytes | None:
        most = ANSWER_BYTES if stop is None else stop - start + _OVERHEAD_BYTES
        with self._call(most):
            part: bytes = self._client.getrange(self._value(key, layer_group), start, -1 if stop is None else stop - 1)
        return part or None

    def put(self, key: EntryKey, values: Sequence[Bytes], pinned: Set[EntryKey]) -> PutResult:
        try:
            return self._put(key, values, pinned)
        except FullError:  # not a fault: the entry is not stored, and reads go on
            return PutResult(stored=False)

    def _put(self, key: EntryKey, values: Sequence[Bytes], pinned: Set[EntryKey]) -> PutResult:
        size, others = sum(len(value) for value in values), [other.to_text() for other in pinned - {key}]
        with self._call():
            state, evicted = self._script(
                self._client, scripts.RESERVE, key, size, len(values), self.capacity_bytes, *others
            )
        if state != 2:
            return PutResult(stored=state == 1)
        try:
            for layer_group in range(len(values) - 1, 0, -1):
                with self._call():
                    self._set(self._client, key, layer_group, values[layer_group])
            with self._call(), self._client.pipeline(transaction=True) as pipeline:  # the head last, with its entry
                self._set(pipeline, key, 0, values[0])
                self._script(pipeline, scripts.ENTER, key, size, len(values))
                pipeline.execute()
        except RemoteError:
            with contextlib.suppress(RemoteError):  # if this fails too, eviction or a lookup drops the rest
                self.delete(key, len(values))
            raise
        return PutResult(stored=True, written_bytes=size, evicted=evicted)

    def delete(self, key: EntryKey, layer_groups: int = 0, content_digest: bytes | None = None) -> bool:
        with self._call():
            arguments = (layer_groups, content_digest or b"", CHECKSUM_START)
            return bool(self._script(self._client, scripts.DROP, key, *arguments))

    def all_keys(self) -> Iterator[EntryKey]:
        for page in self._counted():
            yield from page

    def usage(self) -> Usage:
        sizes = self._accounting[0]
        with self._call(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.hlen(sizes)
            pipeline.hget(sizes, "")
            pipeline.hget(sizes, ".")
            fields, used, scores = pipeline.execute()
            own = 1 + (scores is not None)  # fields that are no keys
            return Usage(max(0, int(fields) - own - int(scores or 0)), max(0, int(used or 0)))

    def audit(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Forget what the server evicted, and enter values that the accounting lacks. One replica at a time does it."""
        with self._call():
            if not self._client.set(self._audited, "1", nx=True, px=round(self.audit_s * 1000)):
                return
        for keys in self._counted():
            if stopped():
                return
            with self._call(), self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    self._script(pipeline, scripts.AUDIT, key)
                pipeline.execute()
        for keys in self._present():
            if stopped():
                return
            with self._call():
                rows = self._client.hmget(self._accounting[0], [key.to_text() for key in keys]) if keys else []
            for key in (key for key, row in zip(keys, rows, strict=True) if row is None):
                with self._call():
                    self._script(self._client, scripts.RECOUNT, key, _MAX_GROUPS)

    def reset(self) -> None:
        self._server.reset()

    def close(self) -> None:
        self._server.close()

    def _script(self, client: Any, script: str, key: EntryKey, *arguments: Any) -> Any:
        return client.eval(scripts.FUNCTIONS + script, 2, *self._accounting, self._root, key.to_text(), *arguments)

    def _set(self, client: Any, key: EntryKey, layer_group: int, value: Bytes) -> None:
        client.set(self._value(key, layer_group), value, px=self._ttl_ms or None)

    def _value(self, key: EntryKey, layer_group: int) -> str:
        return f"{self._root}{key.to_text()}:{layer_group}"

    def _counted(self) -> Iterator[list[EntryKey]]:
        """The keys in the accounting, in pages."""
        for names in self._pages(lambda cursor: self._client.hscan(self._accounting[0], cursor, count=_PAGE)):
            yield _keys(names)  # without the two sums, whose names are no keys

    def _present(self) -> Iterator[list[EntryKey]]:
        """The keys of all heads, in pages; this looks at every name on the server."""
        pattern = self._root.replace("[", "\\[") + "*:0"
        for names in self._pages(lambda cursor: self._client.scan(cursor, match=pattern, count=_PAGE)):
            yield _keys(name[len(self._root) : -2] for name in names)

    def _pages(self, scan: Callable[[int], tuple[int, Iterable[bytes]]]) -> Iterator[list[str]]:
        cursor = 0
        while True:
            with self._call():
                cursor, names = scan(cursor)
            yield [name.decode(errors="replace") for name in names]
            if not cursor:
                return


def _keys(texts: Iterable[str]) -> list[EntryKey]:
    """The keys among these names; another program may have put names of its own between them."""
    return [key for text in texts if (key := EntryKey.from_text(text)) is not None]
