"""The remote tier: entries on storage that replicas share (Redis, S3), whose answers may be late,
wrong or missing.

Every fault is a cache miss: a remote that does not answer, an incomplete entry, bytes that do not
verify. The connector's timeout bounds the time of one fault, and the circuit breaker bounds the
number of faults. If the remote does not confirm a deletion, it is noted and repeated until
confirmed. Until then this process does not serve the entry. The remote knows no leases. If it
evicts an entry, or any process deletes one, that is a cache miss, even during a prefill.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ragkv.config import RemoteConfig
from ragkv.errors import EntryDamagedError, RemoteError
from ragkv.store.entry import EntryInfo, EntryKey, Identity, StoredEntry
from ragkv.store.record import Digest
from ragkv.store.tiers.base import Tier
from ragkv.store.tiers.lease import Lease
from ragkv.store.tiers.stats import Counts, TierStats

from . import entry_values
from .connector import Connector
from .entry_values import RemoteHead
from .health import Health
from .pending_deletions import PendingDeletions
from .remote_lease import RemoteLease
from .remote_reader import PendingLookup, RemoteReader

log = logging.getLogger(__name__)

FRESH_S = 5.0  # A lookup ahead is trusted for so long.
RETRY_S = 5.0  # So much time lies between two attempts at pending deletions.


class RemoteTier(Tier):
    """Entries behind a `Connector`, which the tier owns from now on."""

    is_remote = True

    def __init__(
        self,
        connector: Connector,
        config: RemoteConfig,
        digest: Digest,
        pending: PendingDeletions,
        read_cache_bytes: int,
    ) -> None:
        """`config` is the connector's. Never waits for the remote; see `RemoteReader` for
        `read_cache_bytes`.
        """
        self.kind = connector.kind
        self.connector = connector
        self._digest = digest
        self._pending = pending
        self._layer_group_bytes = config.group_bytes
        self._wake = threading.Event()
        self._wake.set()  # deletions may be pending
        self.health = Health(self.kind, self._wake.set)
        self._counts = Counts()
        self.reader = RemoteReader(
            connector, config, self.health, digest, self._counts, read_cache_bytes
        )
        self._deleting: set[EntryKey] = set()  # by calls under way
        # ahead of their leases, and when they began
        self._lookups: dict[EntryKey, tuple[PendingLookup, float]] = {}
        self._lock = threading.Lock()
        self._deleting_pending = threading.Lock()
        self._closing = threading.Event()
        self._maintainer = threading.Thread(
            target=self._maintain, name=f"ragkv-{self.kind}-keeper", daemon=True
        )
        self._maintainer.start()

    @property
    def answers(self) -> bool:
        """Whether it answered the last call in time."""
        return self.health.answers

    # Reading

    def look_up_ahead(self, keys: Sequence[EntryKey]) -> None:
        """Begin to look up these keys, which will be leased soon."""
        now = time.monotonic()
        with self._lock:
            self._lookups = {
                key: lookup for key, lookup in self._lookups.items() if now - lookup[1] < FRESH_S
            }
            new = [
                key
                for key in dict.fromkeys(keys)
                if key not in self._lookups and not self._is_deleted(key)
            ]
            if new:
                lookup = self.reader.look_up(new)
                self._lookups.update(dict.fromkeys(new, (lookup, now)))

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        head = None
        try:
            head = self.find(key)
            if head is not None:
                head.info.check(identity, token_ids)
        except EntryDamagedError as error:
            self.reader.delete_damaged(key, error, head)
            head = None
        except RemoteError as error:
            log.debug("Entry %s was not looked up: %s", key, error)
        with self._lock:
            if head is None or self._is_deleted(key):
                self._counts.misses += 1
                return None
            self._counts.hits += 1
        return RemoteLease(head, self.reader)

    def find(self, key: EntryKey) -> RemoteHead | None:
        """The verified head of an entry, from a lookup ahead if there was one. Raises
        `RemoteError`, `EntryDamagedError`.
        """
        with self._lock:
            if self._is_deleted(key):
                return None
            lookup, began = self._lookups.pop(key, (None, 0.0))
        if lookup is None or time.monotonic() - began >= FRESH_S:
            lookup = self.reader.look_up([key])
        start = self.reader.wait(lookup)[key]
        return None if start is None else self.reader.head(key, start)

    # Writing

    def put(self, entry: StoredEntry) -> bool:
        key = entry.info.key
        with self._lock:
            self._lookups.pop(key, None)
        try:
            if self._closing.is_set():
                return False
            self._delete_pending(key)
            if self.health.call(lambda: self.connector.exists(key)):
                return True
            packed = entry_values.pack(entry, self._layer_group_bytes, self._digest)
            stored = self.health.call(lambda: self.connector.put(key, packed))
        except RemoteError as error:
            log.debug("Entry %s was not stored: %s", key, error)
            return False
        with self._lock:
            self._counts.written_bytes += sum(len(value) for value in packed) if stored else 0
        return stored

    def delete(self, key: EntryKey) -> bool:
        """See `Tier.delete`. `False` where the remote does not answer; the deletion is then noted
        and repeated. Raises `StoreError` if it cannot be noted.
        """
        with self._lock:
            self._deleting.add(key)
            self._lookups.pop(key, None)
        try:
            return self.health.call(lambda: self.connector.delete(key))
        except RemoteError as error:
            self._pending.add(key)
            log.warning(
                "Entry %s could not be deleted from %s yet (%s); it is not served here, and "
                "deletion is tried again.",
                key,
                self.kind,
                error,
            )
            self._wake.set()
            return False
        finally:
            with self._lock:
                self._deleting.discard(key)

    # State

    def contains(self, key: EntryKey) -> bool:
        """See `Tier.contains`; `False` where the remote does not answer."""
        with self._lock:
            if self._is_deleted(key):
                return False
        try:
            return self.health.call(lambda: self.connector.exists(key))
        except RemoteError as error:
            log.debug("%s: %s", self.kind, error)
            return False

    def scan(self) -> Iterator[tuple[EntryKey, EntryInfo | None]]:
        """Every key with its entry's info, `None` if this code cannot read it; ends early if the
        remote fails.
        """
        try:
            for key in self.connector.all_keys():
                start = self.reader.head_start(key)
                if start is not None and not self._is_deleted(key):
                    try:
                        yield key, self.reader.head(key, start).info
                    except EntryDamagedError as error:
                        log.warning("%s", error)
                        yield key, None
        except RemoteError as error:
            log.warning("%s failed while its entries were listed: %s", self.kind, error)

    def speed(self) -> float | None:
        """The recent speed of reads, bytes a second; `None` if it was not measured."""
        return self.health.meter.speed()

    def stats(self) -> TierStats:
        with self._lock:
            counted = asdict(self._counts)
        health = self.health.stats(len(self._pending.keys))
        return TierStats(self.kind, None, None, None, **counted, remote=health)

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self.reader.close()
        self._maintainer.join()
        self.connector.close()

    def _is_deleted(self, key: EntryKey) -> bool:
        return key in self._deleting or key in self._pending.keys

    # The maintenance thread

    def _maintain(self) -> None:
        """Send probes and repeat pending deletions: in the background, never in a
        request's time.
        """
        while not self._closing.is_set():
            due_s = self.health.probe_due_s()
            self._wake.wait(RETRY_S if due_s is None and self._pending.keys else due_s)
            self._wake.clear()
            try:
                self.health.probe(self.connector.ping)
                for key in self._pending.keys if self.health.available else ():
                    if self._closing.is_set():  # the next start deletes the rest
                        break
                    self._delete_pending(key)
            except RemoteError as error:
                log.debug("%s: %s", self.kind, error)
            except Exception:  # the thread must live on
                log.exception(
                    "Maintenance of %s failed; the next round comes all the same.", self.kind
                )

    def _delete_pending(self, key: EntryKey) -> None:
        """Delete `key` if that is pending still. Raises `RemoteError`."""
        with self._deleting_pending:  # or what is put in between would be deleted, too
            if key in self._pending.keys:
                self.health.call(lambda: self.connector.delete(key))
                self._pending.confirm(key)
