"""Reads from one connector: in threads, in the order in which readers ask, verified on arrival.

An entry is deleted if its bytes do not verify or a part is missing, unless it was rewritten
meanwhile. Then new connections are opened, because a connection that is out of step would show
every value as damaged.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

from ragkv.config import RemoteConfig
from ragkv.errors import EntryDamagedError, EntryUnreachableError, RemoteError
from ragkv.runtime import openmp
from ragkv.store.entry import EntryKey
from ragkv.store.record import Bytes, Digest
from ragkv.store.tiers.stats import Counts

from . import entry_values
from .connector import HEAD_BYTES, Connector
from .entry_values import RemoteHead
from .health import Health

log = logging.getLogger(__name__)

T = TypeVar("T")

PendingLookup = Future[dict[EntryKey, Bytes | None]]  # by key, the beginning of its head

GRACE_S = 0.25  # A thread is waited for so much longer than the connector's own timeout.
LOOKUP_THREADS = 2  # Lookups have these threads of their own, so that they do not wait for layers.


class RemoteReader:
    """Looks heads up and fetches layer groups."""

    def __init__(
        self,
        connector: Connector,
        config: RemoteConfig,
        health: Health,
        digest: Digest,
        counts: Counts,
        read_cache_bytes: int,
    ) -> None:
        """Layer groups that were read may stay here, up to `read_cache_bytes`, until they are
        copied to faster tiers.

        `counts.damaged` and `counts.read_bytes` are counted here.
        """
        self.connector = connector
        self.health = health
        self._digest = digest
        self._name = connector.kind
        self._timeout_s = config.timeout_s
        self._counts = counts
        self._cache_free_bytes = read_cache_bytes
        self._lookups, self._fetches = (
            ThreadPoolExecutor(threads, f"ragkv-{self._name}", initializer=openmp.use_one_thread)
            for threads in (LOOKUP_THREADS, config.connections)
        )
        # re-entrant: garbage collection may close an abandoned lease under it
        self._lock = threading.RLock()

    def look_up(self, keys: Sequence[EntryKey]) -> PendingLookup:
        """Look for the heads of `keys` in one exchange."""

        def look() -> dict[EntryKey, Bytes | None]:
            starts = self.health.call(lambda: self.connector.find(keys))
            return dict(zip(keys, starts, strict=True))

        return _submit(self._lookups, look)

    def fetch(self, head: RemoteHead, layer_group: int) -> Future[Bytes]:
        """The payload of a layer group, verified; see `wait`."""
        return _submit(self._fetches, lambda: self._payload(head, layer_group))

    def wait(self, future: Future[T]) -> T:
        """The result of `look_up` or `fetch`. Raises `RemoteError`, `EntryDamagedError`.

        Connectors end every call within their timeout; if one does not, the waiting ends here.
        """
        ran = False
        while True:
            try:
                return future.result(self._timeout_s + GRACE_S)
            except CancelledError:
                raise RemoteError(f"{self._name} was closed") from None
            except TimeoutError:
                if ran:
                    late = RemoteError(f"{self._name} did not answer", timed_out=True)
                    self.health.failed(late)
                    raise late from None
                # else it is queued behind others, each of which takes a timeout at most
                ran = future.running()

    def head_start(self, key: EntryKey) -> Bytes | None:
        """The beginning of the head of `key`. Not a use. Raises `RemoteError`."""
        return self.health.call(lambda: self.connector.get(key, 0, 0, HEAD_BYTES))

    def head(self, key: EntryKey, start: Bytes) -> RemoteHead:
        """The head that begins with `start`, verified. Raises `RemoteError`,
        `EntryDamagedError`.
        """

        def first(size: int) -> bytes:
            return bytes(self.health.call(lambda: self.connector.get(key, 0, 0, size)) or b"")

        return entry_values.parse_head(key, start, first, self._digest)

    def delete_damaged(
        self, key: EntryKey, why: EntryDamagedError, head: RemoteHead | None
    ) -> None:
        """Delete an entry that is bad or lacks a part, unless it was written anew since `head` was
        read.

        A head deletes once: what was written anew may be the same bytes, and reads that began
        before then lack parts.
        """
        with self._lock:
            if head is not None:
                if head.dropped.is_set():
                    return
                head.dropped.set()
            self._counts.damaged += not isinstance(why, EntryUnreachableError)
        log.warning("%s", why)
        known = None if head is None else head.content_digest
        self.connector.reset()
        try:
            self.health.call(lambda: self.connector.delete(key, known))
        except RemoteError as error:
            log.debug("Damaged entry %s could not be deleted: %s", key, error)

    def reserve_read_cache(self, size_bytes: int) -> bool:
        """Whether so many bytes that were read may stay; then `release_read_cache` must follow."""
        with self._lock:
            if size_bytes > self._cache_free_bytes:
                return False
            self._cache_free_bytes -= size_bytes
            return True

    def release_read_cache(self, size_bytes: int) -> None:
        """Give back what was reserved."""
        with self._lock:
            self._cache_free_bytes += size_bytes

    def count_read(self, size_bytes: int) -> None:
        """A lease handed out so many bytes."""
        with self._lock:
            self._counts.read_bytes += size_bytes

    def close(self) -> None:
        """Cancel queued reads and wait for the running ones."""
        for pool in (self._lookups, self._fetches):
            pool.shutdown(cancel_futures=True)

    def _payload(self, head: RemoteHead, layer_group: int) -> Bytes:
        if not head.layers_of(layer_group):
            return b""
        key = head.info.key
        (start, size) = head.place_of(layer_group)
        # one more: a longer value is not what was written
        data = self._get(key, layer_group, start, start + size + 1)
        try:
            if data is None:
                gone = f"layer group {layer_group} is gone from {self._name}, evicted or deleted"
                raise EntryUnreachableError(key, gone)
            head.check(layer_group, data)
        except EntryDamagedError as error:
            self.delete_damaged(key, error, head)
            raise
        return data

    def _get(self, key: EntryKey, layer_group: int, start: int, stop: int) -> Bytes | None:
        data = None
        self.health.meter.begin_read()
        try:
            data = self.health.call(lambda: self.connector.get(key, layer_group, start, stop))
        finally:
            self.health.meter.end_read(len(data or b""))
        return data


def _submit(pool: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
    """Run `work` in `pool`; once that is closed the future is cancelled at once."""
    try:
        return pool.submit(work)
    except RuntimeError:
        closed = Future[T]()
        closed.cancel()
        return closed
