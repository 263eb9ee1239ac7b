"""Copies between tiers in the background. Demotion writes new entries to slower tiers, promotion
copies hits upward, and prefetching copies upward what waiting requests will read.

A deleted entry must not come back through a copy that was under way. So a promotion is registered
before its entry is looked up, and a deletion cancels all promotions of its key. No copy has to ask
a remote tier whether it still has the entry.

Prefetching is CachedAttention section 3.3.1. The scheduler gives the store a `PrefetchHint` for
every waiting request. A thread copies the entries of the first requests into the fastest tier, in
queue order. The paper prefetches for `C_mem / S_kv` sessions, where S_kv is their mean size. The
hints name the exact sizes, so our window is exact: as many requests as fit into the fastest tier,
without the entries of started requests. A fetch evicts nothing that is in use; what requests in
front need is kept by the policy `lookahead`. An entry that cannot be fetched is not tried again for
the same request; that request will have a miss.
"""

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from ragkv.errors import EntryDamagedError

from .background import Background, Job
from .entry import EncodedEntry, EntryInfo, EntryKey, HintedEntry, PrefetchHint
from .policies import Policy
from .tiers import Lease, Tier, TierKind

log = logging.getLogger(__name__)

# Whether an entry of so many tokens belongs in memory, if a request `used` it, or not, and if
# memory has room, or not.
Placement = Callable[[int, bool, bool], bool]


class Writers:
    """One background thread for each tier, so that none waits for a server of another.
    Thread-safe.
    """

    def __init__(self, tiers: Sequence[Tier], capacity_bytes: int) -> None:
        """Each thread's queue holds at most `capacity_bytes`."""
        # The slowest tier first: a promotion from there submits writes to the faster tiers.
        self._threads = {  # by kind, so that a fake around a tier has the thread of that tier
            tier.kind: Background[EncodedEntry](capacity_bytes, f"ragkv-to-{tier.kind.value}")
            for tier in reversed(tiers)
        }
        self._dropped_lock = threading.Lock()
        self.dropped = 0  # entries not written: the queue was full, or the write failed

    @property
    def pending_bytes(self) -> int:
        """Bytes held by jobs that are not done."""
        return sum(thread.pending_bytes for thread in self._threads.values())

    def submit(self, tier: Tier, job: Job[EncodedEntry], wait_s: float = 0.0) -> bool:
        """Queue a job for the thread of `tier`; `False` if it does not fit, also after `wait_s`."""
        return self._threads[tier.kind].submit(job, wait_s)

    def write(self, tier: Tier, entry: EncodedEntry, wait_s: float = 0.0) -> bool:
        """Write `entry` to `tier` in the background, unless it is there; `False` if it cannot. A
        failure is counted.
        """

        def write() -> None:
            if not tier.put(entry):
                self._count_drop()

        key = entry.info.key
        # a remote tier's `put` checks it, in the background
        present = not tier.is_remote and tier.contains(key)
        if present or self.submit(tier, Job(write, key, entry.size_bytes, entry), wait_s):
            return True
        self._count_drop()
        return False

    def entry(self, key: EntryKey) -> EncodedEntry | None:
        """The entry of `key` that waits to be written, or `None`."""
        found = (thread.entry(key) for thread in self._threads.values())
        return next((entry for entry in found if entry is not None), None)

    def discard(self, key: EntryKey) -> bool:
        """Drop every job of `key`, and wait for the running ones; whether there were any."""
        found = [thread.discard(key) for thread in self._threads.values()]
        return any(found)

    def flush(self) -> None:
        """Return when everything submitted so far is done."""
        for thread in self._threads.values():
            thread.flush()

    def close(self) -> None:
        """Finish the waiting jobs and stop. Twice is harmless."""
        for thread in self._threads.values():
            thread.close()

    def _count_drop(self) -> None:
        with self._dropped_lock:
            self.dropped += 1


@dataclass(eq=False)
class Promotion:
    """One copy under way, or one that a lookup may lead to."""

    key: EntryKey
    depth: int = 0  # number of the source tier: the tiers above it get the copy
    cancelled: bool = False  # read and written under the promoter's lock


class Promoter:
    """Copies entries into `tiers[0]` itself, and through `writers` into the tiers between."""

    def __init__(self, tiers: Sequence[Tier], writers: Writers) -> None:
        self._tiers = tuple(tiers)
        self._writers = writers
        self.placement: Placement = lambda *_: True
        self._running: weakref.WeakSet[Promotion] = weakref.WeakSet()
        self._running_lock = threading.Lock()
        self._lock = threading.Lock()  # held by the last step of a promotion, and by deletions

    def register(self, key: EntryKey) -> Promotion:
        """A promotion that deletions cancel from now on. To be called before `key` is looked up."""
        promotion = Promotion(key)
        with self._running_lock:
            self._running.add(promotion)
        return promotion

    def fetch(self, wanted: HintedEntry) -> bool:
        """Copy an entry up before its use; whether any tier has it."""
        promotion = self.register(wanted.key)
        entry = self._writers.entry(wanted.key)  # memory may evict an entry before it is written
        for depth, tier in enumerate(self._tiers[1:], 1):
            if entry is not None:
                break
            lease = tier.lease(wanted.identity, wanted.token_ids)
            if lease is not None:
                promotion.depth = depth
                with lease:
                    lease.prefetch()
                    entry = lease.read_encoded()
        if entry is None:
            return False
        self._store(entry, promotion, True)
        return True

    def in_memory(self, info: EntryInfo, size_bytes: int, *, used: bool) -> bool:
        """Whether an entry belongs in the fastest tier: the placement says it of memory."""
        if self._tiers[0].kind is not TierKind.MEMORY:
            return True
        memory = self._tiers[0].stats()
        room = (
            memory.capacity_bytes is None
            or (memory.used_bytes or 0) + size_bytes <= memory.capacity_bytes
        )
        return self.placement(info.tokens, used, room)

    @contextmanager
    def deleting(self, key: EntryKey | None = None) -> Iterator[None]:
        """No promotion stores anything during the block; those of `key`, or all, are cancelled
        then.
        """
        with self._lock:
            yield
            with self._running_lock:
                for promotion in self._running:
                    promotion.cancelled |= key in (None, promotion.key)

    def promote(self, lease: Lease, promotion: Promotion) -> None:
        """Copy a leased entry in the background, and close the lease."""
        fastest = self._tiers[0]
        size = lease.stored_bytes
        in_memory = self.in_memory(lease.info, size, used=True)
        if promotion.depth == 1 and not in_memory:
            lease.close()
            return

        def copy() -> None:
            with lease:
                if fastest.contains(promotion.key):
                    return
                entry = lease.read_encoded()
            self._store(entry, promotion, in_memory)

        job: Job[EncodedEntry] = Job(copy, promotion.key, lease.stored_bytes, cancel=lease.close)
        capacity = fastest.stats().capacity_bytes
        fits = capacity is None or lease.stored_bytes <= capacity
        if not fits or not self._writers.submit(self._tiers[promotion.depth], job):
            lease.close()

    def _store(self, entry: EncodedEntry, promotion: Promotion, in_memory: bool) -> None:
        with self._lock:
            if promotion.cancelled:
                return
            if in_memory:
                self._tiers[0].put(entry)
            for tier in self._tiers[1 : promotion.depth]:
                if not tier.read_only:
                    self._writers.write(tier, entry)


class PromotingLease(Lease):
    """A lease of a slower tier. Closing it passes the inner lease to `promote`, unless a read found
    damage.
    """

    def __init__(
        self, lease: Lease, promotion: Promotion, promote: Callable[[Lease, Promotion], None]
    ) -> None:
        self.info = lease.info
        self.kind = lease.kind
        self.in_place = lease.in_place
        self._lease = lease
        self._promotion = promotion
        self._damaged = False
        self._promote: Callable[[Lease, Promotion], None] | None = promote

    @property
    def stored_bytes(self) -> int:
        return self._lease.stored_bytes

    def prefetch(self) -> None:
        self._lease.prefetch()

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        try:
            return self._lease.read_layer(layer, out)
        except EntryDamagedError:
            self._damaged = True
            raise

    def read_encoded(self) -> EncodedEntry:
        return self._lease.read_encoded()

    def close(self) -> None:
        promote = self._promote
        self._promote = None
        if promote is None:
            return
        if self._damaged:
            self._lease.close()
        else:
            promote(self._lease, self._promotion)


Fetch = Callable[[HintedEntry], bool]


@dataclass(slots=True, eq=False)
class _Queued:
    """A request in the queue."""

    hint: PrefetchHint
    started: bool = False
    missing: set[EntryKey] = field(default_factory=set)  # keys that could not be fetched


class Prefetcher:
    """Copies what waiting requests will read into the fastest tier. All methods are thread-safe."""

    def __init__(self, tiers: Sequence[Tier], fetch: Fetch | None) -> None:
        """`fetch(entry)` copies an entry into `tiers[0]`; `False` if no tier has it.

        `None`: nothing is fetched, but the tiers' policies still learn the queue.
        """
        self._tiers = tuple(tiers)
        self._fetch = fetch
        # in order of arrival; started requests stay until they leave
        self._queue: list[_Queued] = []
        self._version = 0  # of the queue
        self._lock = threading.Lock()
        self._worker: Background[None] = Background(0, "ragkv-prefetch")
        self.fetched = 0  # entries

    def queued(self, hint: PrefetchHint) -> None:
        """A request joined the end of the queue. Policies that know the queue protect its
        entries.
        """
        request = _Queued(hint)

        def join(policy: Policy) -> None:
            for group in hint.groups:
                policy.queued(group)

        with self._lock:
            self._queue.append(request)
            for tier in self._tiers:
                tier.tell(join)
            self._change()

    def started(self, hint: PrefetchHint) -> None:
        """The request waits no longer; its entries stay protected until it has left. Ignored if
        unknown.
        """
        with self._lock:
            request = self._find(hint)
            if request is not None:
                request.started = True
                self._change()

    def left(self, hint: PrefetchHint) -> None:
        """The request was served or gave up. Twice is harmless."""
        with self._lock:
            request = self._find(hint)
            if request is None:
                return
            earlier = self._queue[: self._queue.index(request)]
            # requests, by group
            waiting = Counter(group for other in earlier for group in other.hint.groups)
            self._queue.remove(request)

            def leave(policy: Policy) -> None:
                for group in hint.groups:
                    policy.left(group, waiting[group])

            for tier in self._tiers:
                tier.tell(leave)
            self._change()

    def close(self) -> None:
        """Wait for a running fetch, then end the thread. Twice is harmless."""
        with self._lock:
            self._version += 1
        self._worker.close()

    def _change(self) -> None:
        """Look at the queue anew. Needs `_lock`."""
        self._version += 1
        if self._fetch is not None:
            self._worker.submit(Job(partial(self._fetch_window, self._fetch, self._version)))

    def _find(self, hint: PrefetchHint) -> _Queued | None:
        return next((request for request in self._queue if request.hint is hint), None)

    def _fetch_window(self, fetch: Fetch, version: int) -> None:
        """Fetch until the queue changes: another request may be first then, and another job looks
        for it.
        """
        with self._lock:
            queue = list(self._queue)
        window = self._window(queue)
        while self._version == version and (wanted := next(window, None)) is not None:
            self._try(fetch, *wanted)

    def _window(self, queue: Sequence[_Queued]) -> Iterator[tuple[_Queued, HintedEntry]]:
        """The entries to fetch, in order."""
        fastest = self._tiers[0]
        free_bytes = fastest.stats().capacity_bytes or 0
        counted: set[EntryKey] = set()
        for request in queue:
            for entry in request.hint.entries:
                here = fastest.contains(entry.key)
                if entry.key in counted or (
                    not here and (request.started or entry.key in request.missing)
                ):
                    continue
                counted.add(entry.key)
                free_bytes -= entry.size_bytes
                if free_bytes < 0:
                    return
                if not here:
                    yield request, entry

    def _try(self, fetch: Fetch, request: _Queued, entry: HintedEntry) -> None:
        found = False
        try:
            found = fetch(entry)
            self.fetched += found
        except Exception as error:  # damage included: the tier has dropped the entry
            log.warning(
                "Entry %s could not be fetched ahead: %s. It counts as a miss.", entry.key, error
            )
        if not found:
            request.missing.add(entry.key)
