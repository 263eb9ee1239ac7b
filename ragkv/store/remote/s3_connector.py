"""Entries in a bucket of an S3-compatible store (obstore).

Such a store counts nothing and remembers no use. So what is held is counted by listing, in the background, and what
this process writes, reads and deletes is entered in between: several replicas share the bound to within what they write
between two listings. Least recently used is what this process neither wrote nor read lately; another replica's use is
not seen. A lifecycle rule of the bucket bounds what nobody counts.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, cast

from ragkv.config import S3Config
from ragkv.errors import MissingExtraError, RemoteError

from ..record import Bytes
from .connector import HEAD_GUESS, Connector, Held, Placed, Usage
from .values import EDITION_AT, EDITION_BYTES

try:
    import obstore
    from obstore.store import S3Store
except ImportError as error:
    raise MissingExtraError("obstore", "s3", "An S3 tier") from error

_PAGE = 1000  # objects of one answer while listing


class _Row(NamedTuple):
    size: int  # bytes
    groups: int


class S3Connector(Connector):
    """One tenant's entries in one bucket."""

    name = "s3"

    def __init__(self, config: S3Config, tenant: str) -> None:
        """Connects to nothing yet. `tenant` is the part of the paths that is the tenant's."""
        self.capacity_bytes = config.max_bytes
        self._timeout_s = config.timeout_s
        self._root = f"{config.prefix}/{tenant}/"
        place: dict[str, Any] = {"endpoint": config.endpoint, "region": config.region}
        place = {name: value for name, value in place.items() if value is not None}  # else the environment's
        self._store = S3Store(
            config.bucket,
            config=cast(Any, place | {"virtual_hosted_style_request": config.virtual_hosted}),
            client_options={
                "timeout": timedelta(seconds=config.timeout_s),
                "connect_timeout": timedelta(seconds=config.timeout_s),
                "allow_http": (config.endpoint or "").startswith("http://"),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        )
        self._books: OrderedDict[str, _Row] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._writing: set[str] = set()  # keys entered whose head is not written yet
        self._changed: set[str] = set()  # keys whose rows changed since a listing began
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(config.connections, thread_name_prefix="ragkv-s3")

    def find(self, keys: Sequence[str]) -> list[Held | None]:
        found = [self.peek(keys[0])] if len(keys) == 1 else list(self._pool.map(self.peek, keys))
        for key, held in zip(keys, found, strict=True):
            with self._lock:
                if held is None:
                    self._strike(key)
                elif key in self._books:
                    self._books.move_to_end(key)
        return found

    def peek(self, key: str) -> Held | None:
        with self._call():
            start = self._range(key, 0, 0, HEAD_GUESS)
        return None if start is None else Held(key, start)

    def get(self, key: str, group: int, start: int = 0, stop: int | None = None) -> Bytes | None:
        with self._call():
            return self._range(key, group, start, stop)

    def exists(self, key: str) -> bool:
        with self._call():
            try:
                obstore.head(self._store, self._path(key, 0))
            except FileNotFoundError:
                return False
        return True

    def put(self, key: str, values: Sequence[Bytes], pinned: Set[str]) -> Placed:
        if self.exists(key):
            return Placed(kept=True)
        size = sum(len(value) for value in values)
        with self._lock:
            victims = self._reserve(key, _Row(size, len(values)), pinned)
            if victims is None:
                return Placed(kept=False)
            self._writing.add(key)
        try:
            for victim, row in victims:
                self._remove(victim, row.groups)
            for group in range(len(values) - 1, -1, -1):  # the head last
                with self._call():
                    obstore.put(self._store, self._path(key, group), bytes(values[group]), use_multipart=False)
        except RemoteError:
            with self._lock:
                self._strike(key)
            raise
        finally:
            with self._lock:
                self._writing.discard(key)
        return Placed(kept=True, written_bytes=size, evicted=len(victims))

    def delete(self, key: str, groups: int = 0, edition: bytes | None = None) -> bool:
        if edition is not None:  # no store compares and deletes: between these two lines another may write, and lose
            with self._call():
                found = self._range(key, 0, EDITION_AT, EDITION_AT + EDITION_BYTES)
            if found is not None and bytes(found) != edition:
                return False
        there = self.exists(key)
        with self._lock:
            row = self._books.get(key)
        self._remove(key, max(groups, 0 if row is None else row.groups))
        with self._lock:
            self._strike(key)
        return there

    def listed(self) -> Iterator[str]:
        yield from self._rows()

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._books), self._used_bytes)

    def audit(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Count what is there, by listing."""
        with self._lock:
            self._changed = set(self._writing)
        listed = self._rows(stopped)
        if stopped():
            return
        with self._lock:
            for key in set(self._books) - listed.keys() - self._changed:
                self._strike(key)
            for key in reversed(listed):  # what others wrote counts as used before all that this process used
                if key not in self._books and key not in self._changed:
                    self._enter(key, listed[key])
                    self._books.move_to_end(key, last=False)

    def ping(self) -> None:
        self.exists("0" * 64)

    def reset(self) -> None:
        """obstore keeps its own connections, and drops those that failed."""

    def close(self) -> None:
        self._pool.shutdown()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One exchange: whatever goes wrong in it is a `RemoteError`; obstore's timeout includes the body."""
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:  # obstore raises one kind for most; what timed out is told by its text
            text = str(error).partition("\n")[0]
            timed_out = "timed out" in str(error) or "timeout" in str(error).lower()
            raise RemoteError(f"s3: {type(error).__name__}: {text}", timed_out) from error

    def _range(self, key: str, group: int, start: int, stop: int | None) -> Bytes | None:
        wanted: Any = {"offset": start} if stop is None else (start, stop)
        try:
            return memoryview(obstore.get(self._store, self._path(key, group), options={"range": wanted}).bytes())
        except FileNotFoundError:
            return None

    def _path(self, key: str, group: int) -> str:
        return f"{self._root}{key[:2]}/{key}/{group:04d}"

    def _remove(self, key: str, groups: int) -> None:
        """Delete the head first, so that nobody finds a part. With 0 `groups`, however many there are."""
        with self._call():
            obstore.delete(self._store, self._path(key, 0))
            rest = [self._path(key, group) for group in range(1, groups)]
            if not groups:
                found = obstore.list(self._store, f"{self._root}{key[:2]}/{key}/").collect()
                rest = [item["path"] for item in found]
            if rest:
                obstore.delete(self._store, rest)

    def _rows(self, stopped: Callable[[], bool] = lambda: False) -> dict[str, _Row]:
        """What is there whole, the least recently written first."""
        sizes: dict[str, dict[int, int]] = {}
        written: dict[str, float] = {}
        with self._call():
            for page in obstore.list(self._store, self._root, chunk_size=_PAGE):
                if stopped():
                    break
                for item in page:
                    *_, key, group = item["path"].split("/")
                    sizes.setdefault(key, {})[int(group)] = item["size"]
                    written[key] = max(written.get(key, 0.0), item["last_modified"].timestamp())
        whole = [key for key in sizes if 0 in sizes[key]]
        return {key: _Row(sum(sizes[key].values()), len(sizes[key])) for key in sorted(whole, key=written.__getitem__)}

    # The books; their lock is held

    def _reserve(self, key: str, row: _Row, pinned: Set[str]) -> list[tuple[str, _Row]] | None:
        """Enter `key`; what must go for it, struck off already, or `None`, with nothing changed, if it cannot fit."""
        mine = self._books.get(key)
        over = self._used_bytes - (mine.size if mine else 0) + row.size - self.capacity_bytes
        victims = []
        for other, held in self._books.items():
            if over <= 0:
                break
            if other != key and other not in pinned:
                victims.append((other, held))
                over -= held.size
        if over > 0:
            return None
        for other, _ in victims:
            self._strike(other)
        self._enter(key, row)
        return victims

    def _enter(self, key: str, row: _Row) -> None:
        self._strike(key)
        self._books[key] = row
        self._used_bytes += row.size

    def _strike(self, key: str) -> None:
        self._changed.add(key)
        row = self._books.pop(key, None)
        self._used_bytes -= 0 if row is None else row.size
