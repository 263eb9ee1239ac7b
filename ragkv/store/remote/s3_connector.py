"""Entries in a bucket of an S3-compatible store (obstore).

Such a store counts nothing and remembers no use. So a background audit counts the entries by listing them, and between
two audits this process counts what it writes, reads and deletes itself. Several replicas together may exceed the bound
by what they write between two audits. Eviction takes the entries that this process used least recently; it does not see
what other replicas use. A lifecycle rule of the bucket bounds the objects that no replica counts.
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

from ..key import EntryKey
from ..record import CHECKSUM_CHARS, CHECKSUM_START, Bytes
from ..tiers.base import TierKind
from .connector import HEAD_BYTES, Connector, PutResult, Usage

try:
    import obstore
    from obstore.store import S3Store
except ImportError as error:
    raise MissingExtraError("obstore", "s3", "An S3 tier") from error

_PAGE = 1000  # An answer lists so many objects.


class _Size(NamedTuple):
    stored_bytes: int
    layer_groups: int


class S3Connector(Connector):
    """One tenant's entries in one bucket."""

    kind = TierKind.S3

    def __init__(self, config: S3Config, tenant: str) -> None:
        """Connects to nothing yet. `tenant` is the tenant's part of the paths."""
        self.capacity_bytes, self.audit_s = config.max_bytes, config.audit_s
        self._root = f"{config.prefix}/{tenant}/"
        location: dict[str, Any] = {"virtual_hosted_style_request": config.virtual_hosted}
        for name, value in (("endpoint", config.endpoint), ("region", config.region)):
            if value is not None:  # else obstore takes the environment's
                location[name] = value
        timeout = timedelta(seconds=config.timeout_s)
        self._store = S3Store(
            config.bucket,
            config=cast(Any, location),
            client_options={
                "timeout": timeout,
                "connect_timeout": timeout,
                "allow_http": (config.endpoint or "").startswith("http://"),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        )
        self._sizes: OrderedDict[EntryKey, _Size] = OrderedDict()  # by key, least recently used first
        self._used_bytes = 0
        self._writing: set[EntryKey] = set()  # counted keys whose head is not written yet
        self._changed: set[EntryKey] = set()  # keys counted or forgotten since the audit began
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(config.connections, thread_name_prefix="ragkv-s3")

    def find(self, keys: Sequence[EntryKey]) -> list[Bytes | None]:
        found = [self._start(keys[0])] if len(keys) == 1 else list(self._pool.map(self._start, keys))
        with self._lock:
            for key, start in zip(keys, found, strict=True):
                if start is None:
                    self._forget(key)
                elif key in self._sizes:
                    self._sizes.move_to_end(key)
        return found

    def get(self, key: EntryKey, layer_group: int, start: int = 0, stop: int | None = None) -> Bytes | None:
        wanted: Any = {"offset": start} if stop is None else (start, stop)
        with self._call():
            try:
                found = obstore.get(self._store, self._path(key, layer_group), options={"range": wanted})
                return memoryview(found.bytes())
            except FileNotFoundError:
                return None

    def put(self, key: EntryKey, values: Sequence[Bytes], pinned: Set[EntryKey]) -> PutResult:
        if self.exists(key):
            return PutResult(stored=True)
        size = _Size(sum(len(value) for value in values), len(values))
        with self._lock:
            victims = self._reserve(key, size, pinned)
            if victims is None:
                return PutResult(stored=False)
            self._writing.add(key)
        try:
            for victim, gone in victims.items():
                self._delete_values(victim, gone.layer_groups)
            for layer_group in range(len(values) - 1, -1, -1):  # the head last
                with self._call():
                    value = bytes(values[layer_group])
                    obstore.put(self._store, self._path(key, layer_group), value, use_multipart=False)
        except RemoteError:
            with self._lock:
                self._forget(key)
            raise
        finally:
            with self._lock:
                self._writing.discard(key)
        return PutResult(
            stored=True, written_bytes=size.stored_bytes, evicted=sum(not key.is_scores for key in victims)
        )

    def delete(self, key: EntryKey, layer_groups: int = 0, content_digest: bytes | None = None) -> bool:
        if content_digest is not None:  # S3 cannot compare and delete in one step: a rewrite right now is lost
            found = self.get(key, 0, CHECKSUM_START, CHECKSUM_START + CHECKSUM_CHARS)
            if found is not None and bytes(found) != content_digest:
                return False
        there = self.exists(key)
        with self._lock:
            known = self._sizes.get(key, _Size(0, 0)).layer_groups
        self._delete_values(key, max(layer_groups, known))
        with self._lock:
            for each in (key, *key.scores):
                self._forget(each)
        return there

    def all_keys(self) -> Iterator[EntryKey]:
        yield from self._listed()

    def usage(self) -> Usage:
        with self._lock:
            return Usage(sum(not key.is_scores for key in self._sizes), self._used_bytes)

    def audit(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Count what is there, by listing it."""
        with self._lock:
            self._changed = set(self._writing)
        listed = self._listed(stopped)
        if stopped():
            return
        with self._lock:
            for key in set(self._sizes) - listed.keys() - self._changed:
                self._forget(key)
            for key in reversed(listed):  # entries of other replicas count as used before all that this process used
                if key not in self._sizes and key not in self._changed:
                    self._count(key, listed[key])
                    self._sizes.move_to_end(key, last=False)

    def close(self) -> None:
        self._pool.shutdown()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One exchange: every error in it is a `RemoteError`. obstore's timeout includes the answer's body."""
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:  # obstore raises one class for most errors; only the text tells a timeout
            text = str(error)
            timed_out, first_line = "timed out" in text or "timeout" in text.lower(), text.partition("\n")[0]
            raise RemoteError(f"s3: {type(error).__name__}: {first_line}", timed_out) from error

    def _start(self, key: EntryKey) -> Bytes | None:
        return self.get(key, 0, 0, HEAD_BYTES)

    def _path(self, key: EntryKey, layer_group: int) -> str:
        return f"{self._root}{key.chunk[:2]}/{key.to_text()}/{layer_group:04d}"

    def _delete_values(self, key: EntryKey, layer_groups: int) -> None:
        """Delete the head first, so that no lookup finds a part. With 0 `layer_groups`, list them."""
        with self._call():
            obstore.delete(self._store, [self._path(each, 0) for each in (*key.scores, key)])
            rest = [self._path(key, layer_group) for layer_group in range(1, layer_groups)]
            if not layer_groups:
                found = obstore.list(self._store, f"{self._root}{key.chunk[:2]}/{key.to_text()}/").collect()
                rest = [item["path"] for item in found]
            if rest:
                obstore.delete(self._store, rest)

    def _listed(self, stopped: Callable[[], bool] = lambda: False) -> dict[EntryKey, _Size]:
        """The entries that have a head, the least recently written first."""
        sizes: dict[EntryKey, dict[int, int]] = {}
        written: dict[EntryKey, float] = {}
        with self._call():
            for page in obstore.list(self._store, self._root, chunk_size=_PAGE):
                if stopped():
                    break
                for item in page:
                    *_, text, layer_group = item["path"].split("/")
                    if (key := EntryKey.from_text(text)) is None or not layer_group.isdecimal():
                        continue  # another program's object
                    sizes.setdefault(key, {})[int(layer_group)] = item["size"]
                    written[key] = max(written.get(key, 0.0), item["last_modified"].timestamp())
        whole = sorted((key for key in sizes if 0 in sizes[key]), key=written.__getitem__)
        return {key: _Size(sum(sizes[key].values()), len(sizes[key])) for key in whole}

    # Accounting; the caller holds the lock

    def _reserve(self, key: EntryKey, size: _Size, pinned: Set[EntryKey]) -> dict[EntryKey, _Size] | None:
        """Count `key`, and forget the victims evicted for it. `None`, with nothing changed, if it cannot fit."""
        mine = self._sizes.get(key, _Size(0, 0)).stored_bytes
        over = self._used_bytes - mine + size.stored_bytes - self.capacity_bytes
        victims = {}
        for other, held in self._sizes.items():
            if over <= 0:
                break
            if other != key and other not in pinned:
                victims[other] = held
                over -= held.stored_bytes
        if over > 0:
            return None
        for other in victims:
            for each in (other, *other.scores):
                self._forget(each)
        self._count(key, size)
        return victims

    def _count(self, key: EntryKey, size: _Size) -> None:
        self._forget(key)
        self._sizes[key] = size
        self._used_bytes += size.stored_bytes

    def _forget(self, key: EntryKey) -> None:
        self._changed.add(key)
        self._used_bytes -= self._sizes.pop(key, _Size(0, 0)).stored_bytes
