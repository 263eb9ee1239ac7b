"""Entries on a Redis or Valkey server (redis-py), bounded and counted there (`redis_scripts.py`).

Nothing is retried: an error is a miss, and the breaker's to judge.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Any, TypeVar

from ragkv.config import RedisConfig
from ragkv.errors import RemoteError

from ..record import Bytes
from . import redis_scripts as scripts
from .connector import HEAD_GUESS, Connector, Held, Placed, Usage
from .redis_server import FullError, RedisServer
from .values import EDITION_AT

AUDIT_S = 600.0  # of all replicas, one counts what the server evicted, so often at most
_PAGE = 500  # keys of one answer while listing

T = TypeVar("T")


class RedisConnector(Connector):
    """One tenant's entries on one server."""

    name = "redis"
    arbitrates = True

    def __init__(self, config: RedisConfig, tenant: str) -> None:
        """Connects to nothing yet. `tenant` is the part of the keys that is the tenant's."""
        self.capacity_bytes = config.max_bytes
        self._ttl_ms = 0 if config.ttl_s is None else max(1, round(config.ttl_s * 1000))
        base = f"{config.prefix}:{tenant}:"
        self._root, self._flights, self._audited = f"{base}v:", f"{base}flight:", f"{base}audited"
        self._books = (f"{base}sizes", f"{base}uses")
        self._server = RedisServer(config)
        self._client, self._call = self._server.client, self._server.call

    def find(self, keys: Sequence[str]) -> list[Held | None]:
        with self._call(), self._client.pipeline(transaction=False) as line:
            for key in keys:
                self._script(line, scripts.FIND, key, HEAD_GUESS, self._ttl_ms)
            found = line.execute()
        return [Held(key, start) if start else None for key, start in zip(keys, found, strict=True)]

    def peek(self, key: str) -> Held | None:
        with self._call():
            start = self._client.getrange(self._value(key, 0), 0, HEAD_GUESS - 1)
        return Held(key, start) if start else None

    def get(self, key: str, group: int, start: int = 0, stop: int | None = None) -> Bytes | None:
        with self._call():
            if not start and stop is None:
                whole: bytes | None = self._client.get(self._value(key, group))
                return whole
            part: bytes = self._client.getrange(self._value(key, group), start, -1 if stop is None else stop - 1)
        return part or None

    def exists(self, key: str) -> bool:
        with self._call():
            return bool(self._client.exists(self._value(key, 0)))

    def put(self, key: str, values: Sequence[Bytes], pinned: Set[str]) -> Placed:
        try:
            return self._put(key, values, pinned)
        except FullError:  # nobody's fault: it is not kept, and what is there can be read
            return Placed(kept=False)

    def _put(self, key: str, values: Sequence[Bytes], pinned: Set[str]) -> Placed:
        size = sum(len(value) for value in values)
        with self._call():
            answer = self._script(
                self._client, scripts.RESERVE, key, size, len(values), self.capacity_bytes, *sorted(pinned - {key})
            )
        state, evicted = answer
        if state != 2:
            return Placed(kept=state == 1)
        try:
            for group in range(len(values) - 1, 0, -1):
                with self._call():
                    self._set(self._client, key, group, values[group])
            with self._call(), self._client.pipeline(transaction=True) as line:  # the head last, and in the books
                self._set(line, key, 0, values[0])
                self._script(line, scripts.ENTER, key, size, len(values))
                line.execute()
        except RemoteError:
            with contextlib.suppress(RemoteError):  # else it is struck off when it is evicted or looked for
                self.delete(key, len(values))
            raise
        return Placed(kept=True, written_bytes=size, evicted=evicted)

    def delete(self, key: str, groups: int = 0, edition: bytes | None = None) -> bool:
        with self._call():
            return bool(self._script(self._client, scripts.DROP, key, groups, edition or b"", EDITION_AT))

    def listed(self) -> Iterator[str]:
        for name, _ in self._rows():
            yield name

    def usage(self) -> Usage:
        with self._call(), self._client.pipeline(transaction=True) as line:
            line.hlen(self._books[0])
            line.hget(self._books[0], "")
            fields, used = line.execute()
        return Usage(max(0, fields - 1), int(used or 0))

    def audit(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Strike off what the server evicted, take in what is there and in no book."""
        with self._call():
            if not self._client.set(self._audited, "1", nx=True, px=round(AUDIT_S * 1000)):
                return
        for keys in _batched(self._rows(), _PAGE):
            if stopped():
                return
            with self._call(), self._client.pipeline(transaction=False) as line:
                for key, _ in keys:
                    self._script(line, scripts.AUDIT, key)
                line.execute()
        for heads in _batched(self._heads(), _PAGE):
            if stopped():
                return
            with self._call():
                known = self._client.hmget(self._books[0], heads)
            for key, row in zip(heads, known, strict=True):
                if row is None:
                    with self._call():
                        self._adopt(key)

    def ping(self) -> None:
        with self._call():
            self._client.ping()

    def claim(self, name: str, expires_s: float) -> str | None:
        token = secrets.token_hex(16)
        with self._call():
            ours = self._client.set(self._flights + name, token, nx=True, px=max(1, round(expires_s * 1000)))
        return token if ours else None

    def release(self, name: str, token: str) -> None:
        with self._call():
            self._client.eval(scripts.RELEASE, 1, self._flights + name, token)

    def reset(self) -> None:
        self._server.reset()

    def close(self) -> None:
        self._server.close()

    def _script(self, client: Any, script: str, key: str, *arguments: Any) -> Any:
        return client.eval(script, 2, *self._books, self._root, key, *arguments)

    def _set(self, client: Any, key: str, group: int, value: Bytes) -> None:
        client.set(self._value(key, group), value, px=self._ttl_ms or None)

    def _value(self, key: str, group: int) -> str:
        return f"{self._root}{key}:{group}"

    def _rows(self) -> Iterator[tuple[str, bytes]]:
        cursor = 0
        while True:
            with self._call():
                cursor, page = self._client.hscan(self._books[0], cursor, count=_PAGE)
            yield from ((name.decode(), row) for name, row in page.items() if name)
            if not cursor:
                return

    def _heads(self) -> Iterator[str]:
        """Keys of all heads there are: a look at every key of the server."""
        cursor, pattern = 0, self._root.replace("[", "\\[") + "*:0"
        while True:
            with self._call():
                cursor, page = self._client.scan(cursor, match=pattern, count=_PAGE)
            yield from (name.decode()[len(self._root) : -2] for name in page)
            if not cursor:
                return

    def _adopt(self, key: str) -> None:
        size = groups = 0
        while length := self._client.strlen(self._value(key, groups)):
            size, groups = size + length, groups + 1
        self._script(self._client, scripts.ENTER, key, size, groups)


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """`items` in lists of `size`, the last shorter. `itertools` has it from Python 3.12 on."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
