"""The remote tier: entries on storage that replicas share (Redis, S3), whose answers may be late, wrong or missing.

Whatever goes wrong is a miss: what cannot be reached or is not whole, what does not verify. Only what was found bad
twice, on two connections, or lacks a part is deleted, and only if it still is what was found. Faults are bounded in
time by the connector's timeout, and in number by a breaker. A deletion the remote did not confirm is noted and tried
until it is; this process serves the entry no more. Other processes' leases are not known here: what one deletes or
evicts is another's miss, in the middle of a pass if need be.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import TypeVar

from ragkv.errors import EntryDamagedError, EntryUnreachableError, RemoteError
from ragkv.runtime import PriorityThreadPool

from ..encoded import EncodedEntry
from ..entry import Entry, EntryInfo, Identity
from ..record import Bytes
from ..tiers.base import Lease, Speed, Tier, TierKind, TierStats
from ..tiers.ledger import Counts
from . import values
from .breaker import Breaker
from .connector import Connector, Held, Usage
from .guard import Guard
from .lease import RemoteLease
from .meter import Meter
from .tombstones import Tombstones
from .values import RemoteHead, Seal

log = logging.getLogger(__name__)

T = TypeVar("T")

FRESH_S = 5.0  # what was looked up ahead is believed for so long
GRACE_S = 0.25  # of waiting for a thread beyond the connector's own timeout
RETRY_S = 5.0  # between attempts at pending deletions
AUDIT_S = 600.0
_LOOKUP = -1  # before all layers


class RemoteTier(Tier):
    """Entries behind a `Connector`, which it owns from now on."""

    is_remote = True

    def __init__(
        self,
        kind: TierKind,
        connector: Connector,
        *,
        timeout_s: float,
        pool: int = 4,
        group_bytes: int = 512 * 1024,
        seal: Seal | None = None,
        tombstones: Tombstones | None = None,
        keep_bytes: int = 256 * 1024**2,
        audit_s: float = AUDIT_S,
        breaker: Breaker | None = None,
    ) -> None:
        """`timeout_s` is the connector's. `pool` values are fetched at a time, layers grouped to `group_bytes`.

        `keep_bytes` of what was read stay here until it is copied to faster tiers. Never waits for the remote.
        """
        self.kind, self.arbitrates = kind, connector.arbitrates
        self._connector, self._timeout_s, self._group_bytes = connector, timeout_s, group_bytes
        self._seal = Seal() if seal is None else seal
        self._deletions = Tombstones(None) if tombstones is None else tombstones
        self._keep_bytes, self._kept_bytes = keep_bytes, 0
        self._wake = threading.Event()
        self._guard = Guard(kind.value, timeout_s, Breaker() if breaker is None else breaker, self._wake.set)
        self._breaker = self._guard.breaker
        self._meter = Meter()
        self._lanes = PriorityThreadPool(pool, f"ragkv-{kind.value}")
        self._counts = Counts()
        self._usage = Usage(0, 0)  # as last known
        self._pins: dict[str, set[RemoteLease]] = {}
        self._deleting: set[str] = set()
        self._expected: dict[str, tuple[Future[dict[str, Held | None]], float]] = {}
        self._lock = threading.RLock()  # re-entrant, as an abandoned lease may be collected under it
        self._audit_s = audit_s
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep_up, name=f"ragkv-{kind.value}-keeper", daemon=True)
        self._keeper.start()

    # Reading

    def look_up_ahead(self, keys: Sequence[str], on_missing: Callable[[Sequence[str]], None]) -> None:
        now = time.monotonic()
        with self._lock:
            self._expected = {key: past for key, past in self._expected.items() if now - past[1] < FRESH_S}
            new = [key for key in dict.fromkeys(keys) if key not in self._expected and not self._is_gone(key)]
            if not new:
                return

            def look() -> dict[str, Held | None]:
                try:
                    found = dict(zip(new, self._guard.ask(lambda: self._look_up(new)), strict=True))
                except RemoteError:
                    on_missing(new)
                    raise
                on_missing([key for key, held in found.items() if held is None])
                return found

            future = self._lanes.submit(_LOOKUP, look)
            self._expected.update(dict.fromkeys(new, (future, now)))

    def lease(self, identity: Identity, token_ids: Sequence[int]) -> Lease | None:
        key = identity.key(token_ids)
        head = None
        try:
            head = self._find(key)
            if head is not None and not head.info.matches(identity, token_ids):
                raise EntryDamagedError(key, "its identity or tokens are not those asked for")
        except EntryDamagedError as error:
            self._damaged(key, error, head)
            head = None
        except RemoteError as error:
            log.debug("Entry %s was not looked up: %s", key[:12], error)
        with self._lock:
            if head is None or self._is_gone(key):
                self._counts.misses += 1
                return None
            self._counts.hits += 1
            lease = RemoteLease(head, self)
            self._pins.setdefault(key, set()).add(lease)
        return lease

    def fetch(self, head: RemoteHead, group: int) -> "Future[Bytes]":
        """See `Source`."""
        return self._lanes.submit(head.layers_of(group).start, lambda: self._payload(head, group))

    def wait(self, future: "Future[T]") -> T:
        """See `Source`. The connector keeps its time; should it not, nobody waits for it for ever."""
        ran = False
        while True:
            try:
                return future.result(self._timeout_s + GRACE_S)
            except CancelledError:
                raise RemoteError(f"{self.kind.value} was closed") from None
            except TimeoutError:
                if ran:
                    late = RemoteError(f"{self.kind.value} did not answer", timed_out=True)
                    self._guard.failed(late, self._timeout_s + GRACE_S)
                    raise late from None
                ran = future.running()  # else others are before it, each for a timeout at most

    def keep(self, size_bytes: int) -> bool:
        """See `Source`."""
        with self._lock:
            if self._kept_bytes + size_bytes > self._keep_bytes:
                return False
            self._kept_bytes += size_bytes
            return True

    def unkeep(self, size_bytes: int) -> None:
        """See `Source`."""
        with self._lock:
            self._kept_bytes -= size_bytes

    def count_read(self, size_bytes: int) -> None:
        """See `Source`."""
        with self._lock:
            self._counts.read_bytes += size_bytes

    def unpin(self, lease: RemoteLease) -> None:
        """See `Source`."""
        with self._lock:
            leases = self._pins.get(lease.info.key)
            if leases is not None and lease in leases:
                leases.discard(lease)
                if not leases:
                    del self._pins[lease.info.key]

    # Writing

    def put(self, entry: Entry | EncodedEntry, protected: Set[str] = frozenset()) -> bool:
        key = entry.info.key
        with self._lock:
            self._expected.pop(key, None)
        try:
            if self._closing.is_set() or (key in self._deletions and not self._confirmed(key)):
                return False
            if self._guard.ask(lambda: self._connector.exists(key)):
                return True
            encoded = EncodedEntry.of(entry)
            if encoded.size_bytes > self._connector.capacity_bytes:
                return False
            written = values.pack(encoded, self._group_bytes, self._seal)
            with self._lock:
                pinned = frozenset(self._pins)
            placed = self._guard.ask(lambda: self._connector.put(key, written, pinned), brief=False)
        except RemoteError as error:
            log.debug("Entry %s was not kept: %s", key[:12], error)
            return False
        with self._lock:
            self._counts.written_bytes += placed.written_bytes
            self._counts.evictions += placed.evicted
        return placed.kept

    def contains(self, key: str) -> bool:
        """See `Tier.contains`; `False` where the remote does not answer."""
        with self._lock:
            if self._is_gone(key):
                return False
        try:
            return self._guard.ask(lambda: self._connector.exists(key))
        except RemoteError:
            return False

    def delete(self, key: str) -> bool:
        """See `Tier.delete`. Where the remote does not answer: `False`; it is noted, and done as soon as it does."""
        with self._lock:
            self._deleting.add(key)
            self._expected.pop(key, None)
            leases = self._pins.pop(key, set())
        try:
            for lease in leases:
                lease.hold()
            return self._guard.ask(lambda: self._connector.delete(key), brief=False)
        except RemoteError as error:
            self._deletions.add(key)
            log.warning(
                "Entry %s could not be deleted from %s yet (%s); it is not served here, and deletion is tried again.",
                key[:12],
                self.kind.value,
                error,
            )
            self._wake.set()
            return False
        finally:
            with self._lock:
                self._deleting.discard(key)

    def infos(self) -> Iterator[EntryInfo]:
        for _, info in self._held():
            if info is not None:
                yield info

    def gc(self, keep: Callable[[Identity], bool]) -> int:
        before = self.stats().used_bytes
        for key, info in list(self._held()):
            if info is None or not keep(info.identity):
                self.delete(key)
        return before - self.stats().used_bytes

    def claim(self, name: str, expires_s: float) -> str | None:
        try:
            return self._guard.ask(lambda: self._connector.claim(name, expires_s))
        except RemoteError:
            return ""

    def release(self, name: str, token: str) -> None:
        try:
            if token:
                self._guard.ask(lambda: self._connector.release(name, token))
        except RemoteError as error:
            log.debug("A claim was left to expire: %s", error)

    # About it

    def speed(self) -> Speed | None:
        """How fast it was lately, or `None` if nothing was read."""
        return self._meter.speed()

    def stats(self) -> TierStats:
        try:
            usage = self._guard.ask(self._connector.usage)
        except RemoteError:
            usage = self._usage
        with self._lock:
            self._usage = usage
            counted = self._counts.stats(self.kind, usage.entries, usage.used_bytes, self._connector.capacity_bytes)
        return replace(counted, remote=self._guard.stats(self._meter.speed(), len(self._deletions)))

    def close(self) -> None:
        self._closing.set()
        self._guard.close()
        self._lanes.close()
        self._keeper.join()
        self._connector.close()

    # Looking

    def _look_up(self, keys: Sequence[str]) -> list[Held | None]:
        began = time.monotonic()
        found = self._connector.find(keys)
        self._meter.looked_up((time.monotonic() - began) / max(1, len(keys)))
        return found

    def _find(self, key: str) -> RemoteHead | None:
        """The verified head of `key`. Raises `RemoteError`, and `EntryDamagedError` if it is bad, twice."""
        with self._lock:
            if self._is_gone(key):
                return None
            future, at = self._expected.pop(key, (None, 0.0))
        if future is not None and time.monotonic() - at < FRESH_S:
            held = self.wait(future)[key]
        else:
            (held,) = self.wait(self._lanes.submit(_LOOKUP, lambda: self._guard.ask(lambda: self._look_up([key]))))
        if held is None:
            return None
        try:
            return self._head(held)
        except EntryDamagedError:
            again = self._guard.ask(lambda: self._again(lambda: self._connector.peek(key)))
            return None if again is None else self._head(again)

    def _head(self, held: Held) -> RemoteHead:
        def more(size: int) -> Bytes:
            return self._guard.ask(lambda: self._connector.get(held.key, 0, 0, size)) or b""

        return values.head_of(held.key, values.parse(held.key, held.start, self._seal, more))

    def _payload(self, head: RemoteHead, group: int) -> Bytes:
        """A group, verified: in a lane. What is bad twice, or gone, takes the entry with it."""
        if not head.layers_of(group):
            return b""
        try:
            try:
                return self._verified(head, group, self._get(head, group))
            except EntryDamagedError:
                return self._verified(head, group, self._again(lambda: self._get(head, group)))
        except EntryDamagedError as error:
            self._damaged(head.info.key, error, head)
            raise

    def _get(self, head: RemoteHead, group: int) -> Bytes | None:
        start, size = head.value.start if group == 0 else 0, 0
        self._meter.begin()
        try:
            data = self._guard.ask(lambda: self._connector.get(head.info.key, group, start))
            size = len(data or b"")
            return data
        finally:
            self._meter.end(size)

    def _verified(self, head: RemoteHead, group: int, data: Bytes | None) -> Bytes:
        key = head.info.key
        if data is None:
            raise EntryUnreachableError(key, f"group {group} is gone from {self.kind.value}, evicted or deleted")
        value = head.value
        if group != 0:
            value = values.parse(key, data, self._seal)
            head.check(value, group)
            data = memoryview(data)[value.start :]
        value.check(key, data, self._seal)
        return data

    def _again(self, read: Callable[[], T]) -> T:
        """The same on a new connection: one that lost its place would show every value as damaged."""
        self._connector.reset()
        return read()

    def _damaged(self, key: str, why: EntryDamagedError, head: RemoteHead | None) -> None:
        """Drop what was found to be bad, or to lack a part, if it still is what it was."""
        log.warning("%s", why)
        with self._lock:
            self._counts.damaged += not isinstance(why, EntryUnreachableError)
        groups, edition = (0, None) if head is None else (head.groups, head.edition)
        try:
            self._guard.ask(lambda: self._connector.delete(key, groups, edition), brief=False)
        except RemoteError as error:
            log.debug("Entry %s stays where it is: %s", key[:12], error)

    def _held(self) -> Iterator[tuple[str, EntryInfo | None]]:
        """Every key and what its head says, `None` if this code cannot read it; ends where the remote fails."""
        try:
            for key in self._connector.listed():
                held = self._guard.ask(lambda key=key: self._connector.peek(key))  # type: ignore[misc]
                if held is not None and not self._is_gone(key):
                    try:
                        yield key, self._head(held).info
                    except EntryDamagedError as error:
                        log.warning("%s", error)
                        yield key, None
        except RemoteError as error:
            log.warning("What %s holds could not be listed to its end: %s", self.kind.value, error)

    def _is_gone(self, key: str) -> bool:
        return key in self._deleting or key in self._deletions

    # In the background

    def _keep_up(self) -> None:
        """Probe what does not answer, delete what waits to be, make the books right; never in a request's time."""
        audit_at = 0.0
        while not self._closing.is_set():
            self._wake.clear()
            due_s = self._breaker.due_s()
            if due_s is None:
                due_s = max(0.0, audit_at - time.monotonic())
                due_s = min(due_s, RETRY_S) if len(self._deletions) and audit_at else due_s
            self._wake.wait(due_s)
            try:
                if self._breaker.probe(self._connector.ping):
                    log.info("%s answers again.", self.kind.value)
                if self._breaker.admits() and not self._closing.is_set():
                    for key in self._deletions.pending():
                        self._confirmed(key)
                    if time.monotonic() >= audit_at:
                        audit_at = time.monotonic() + self._audit_s
                        self._guard.ask(lambda: self._connector.audit(self._closing.is_set), brief=False)
            except RemoteError as error:
                log.debug("%s: %s", self.kind.value, error)
            except Exception:  # the thread must live on
                log.exception("Work behind %s failed; going on without it.", self.kind.value)

    def _confirmed(self, key: str) -> bool:
        """Delete what waits to be. Raises `RemoteError`."""
        self._guard.ask(lambda: self._connector.delete(key), brief=False)
        self._deletions.discard(key)
        return True
