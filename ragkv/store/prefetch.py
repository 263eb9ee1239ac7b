"""Copies entries that waiting requests will read into the fastest tier (CachedAttention section
3.3.1).

The scheduler announces each waiting request with a `PrefetchHint`. Policies protect the entries of
the hint. A thread copies the entries of the first requests to the fastest tier, in queue order. A
question that need not wait uses none of this.

The paper prefetches for `C_mem / S_kv` sessions, where S_kv is their mean size. Hints name exact
sizes, so our window is exact: as many entries as fit into the fastest tier. The window only moves
on. An entry is looked at once, when there is room for it. Its room is free again when the last
request that reads it leaves. So the cost of a request depends on what it reads, not on the length
of the queue.

A fetch evicts nothing that is in use. The policy `lookahead` keeps what earlier requests need. An
entry that cannot be fetched is not tried again for the same request, which then has a cache miss.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .copying import TierCopies, or_none
from .entry import EntryKey, Identity
from .job_queue import Job, JobQueue
from .policies import Policy
from .tiers import Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HintedEntry:
    """One entry that a request will look up."""

    identity: Identity
    token_ids: tuple[int, ...]
    size_bytes: int  # in memory, as far as it is known
    group: str = ""  # the conversation it is stored under; "" for a chunk
    key: EntryKey = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.identity.key(self.token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchHint:
    """All entries that one request will look up, in the order of their use. Compared by
    identity.
    """

    entries: tuple[HintedEntry, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that policies know these entries by, without repetition."""
        return tuple(dict.fromkeys(entry.group or entry.key.digest for entry in self.entries))


@dataclass(slots=True, eq=False)
class _Queued:
    """A request that has not left."""

    number: int  # requests have their numbers in the order in which they joined
    waits: bool = True  # it has not started
    gone: bool = False
    inside: dict[EntryKey, int] = field(default_factory=dict)  # bytes of its part of the window


@dataclass(eq=False)
class Prefetcher:
    """The window over the queue."""

    tiers: Sequence[Tier]
    copies: TierCopies  # between these tiers
    fetches: bool = True  # `False`: nothing is copied up, but the tiers still learn the queue
    fetched: int = field(default=0, init=False)  # entries
    _joined: int = field(default=0, init=False)
    _requests: dict[PrefetchHint, _Queued] = field(default_factory=dict, init=False)
    # behind the window, in order
    _beyond: deque[tuple[_Queued, HintedEntry]] = field(default_factory=deque, init=False)
    # requests that read an entry in the window
    _readers: Counter[EntryKey] = field(default_factory=Counter, init=False)
    _window_bytes: int = field(default=0, init=False)  # of what is inside the window
    _closed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _worker: JobQueue[None] = field(
        default_factory=partial(JobQueue, 0, "ragkv-prefetch"), init=False
    )

    def queued(self, hint: PrefetchHint) -> None:
        """A request that will look up the entries of `hint` joined the end of the queue. Policies
        that know the queue protect them.
        """
        with self._lock:
            self._joined += 1
            request = self._requests[hint] = _Queued(self._joined)
            self._notify_policies(hint, lambda policy, group: policy.queued(group, request.number))
            if self.fetches:
                self._beyond.extend((request, entry) for entry in hint.entries)
        self._wake()

    def started(self, hint: PrefetchHint) -> None:
        """The request waits no longer: nothing more is fetched for it. Its entries stay protected
        until it has left. Ignored if unknown.
        """
        with self._lock:
            if (request := self._requests.get(hint)) is None:
                return
            request.waits = False
        self._wake()
        self._look_ahead(hint)

    def left(self, hint: PrefetchHint) -> None:
        """The request has opened its entries, or gave up. Twice is harmless."""
        with self._lock:
            if (request := self._requests.pop(hint, None)) is None:
                return
            request.gone = True
            for key in list(request.inside):
                self._release(request, key)
            self._notify_policies(hint, lambda policy, group: policy.left(group, request.number))
        self._wake()

    @property
    def requests(self) -> int:
        """How many requests have not left."""
        return len(self._requests)

    def flush(self) -> None:
        """Return when all is fetched that fits now."""
        self._worker.flush()

    def close(self) -> None:
        """Wait for a running fetch, then end the thread."""
        self._closed = True
        self._worker.close()

    def _notify_policies(self, hint: PrefetchHint, what: Callable[[Policy, str], object]) -> None:
        def notify(policy: Policy) -> None:
            for group in hint.groups:
                what(policy, group)

        for tier in self.tiers:
            if tier.ledger is not None:
                or_none("notify a policy of a waiting request", tier.ledger.notify_policy, notify)

    def _look_ahead(self, hint: PrefetchHint) -> None:
        """Let the remote tiers look up what no local tier has, all at once."""
        remote = [tier for tier in self.tiers if tier.is_remote]
        if not remote:
            return
        far = [
            entry.key
            for entry in hint.entries
            if not self.copies.waiting(entry.key)
            and not any(tier.contains(entry.key) for tier in self.tiers if not tier.is_remote)
        ]
        for tier in remote:
            or_none("look ahead", tier.look_up_ahead, far)

    def _wake(self) -> None:
        if self.fetches:
            or_none("fetch ahead", self._worker.submit, Job(self._run))

    def _run(self) -> None:
        while not self._closed and (wanted := self._next()) is not None:
            self._try(*wanted)

    def _next(self) -> tuple[_Queued, HintedEntry] | None:
        """Move the window on to the next entry that must be fetched; `None` if that has no room."""
        fastest = self.tiers[0]
        most_bytes = fastest.stats().capacity_bytes or 0
        with self._lock:
            while self._beyond:
                request, entry = self._beyond[0]
                is_inside = entry.key in self._readers
                is_here = is_inside or fastest.contains(entry.key)
                is_wanted = not request.gone and (request.waits or is_here)
                if (
                    is_wanted
                    and not is_inside
                    and self._window_bytes + entry.size_bytes > most_bytes
                ):
                    return None
                self._beyond.popleft()
                if is_wanted:
                    self._admit(request, entry)
                    if not is_here:
                        return request, entry
        return None

    def _admit(self, request: _Queued, entry: HintedEntry) -> None:
        """A request's entry is inside the window now. The caller holds `_lock`."""
        if entry.key in request.inside:
            return
        request.inside[entry.key] = entry.size_bytes
        if not self._readers[entry.key]:
            self._window_bytes += entry.size_bytes
        self._readers[entry.key] += 1

    def _release(self, request: _Queued, key: EntryKey) -> None:
        """It is outside again; the last reader gives the room back. The caller holds
        `_lock`.
        """
        size_bytes = request.inside.pop(key)
        self._readers[key] -= 1
        if not self._readers[key]:
            del self._readers[key]
            self._window_bytes -= size_bytes

    def _try(self, request: _Queued, entry: HintedEntry) -> None:
        found = False
        try:
            found = self.copies.fetch(entry.identity, entry.token_ids)
            self.fetched += found
        except Exception as error:  # damage included: the tier has dropped the entry
            log.warning(
                "Entry %s could not be fetched ahead: %s. It counts as a miss.", entry.key, error
            )
        if not found:
            with self._lock:
                if entry.key in request.inside:
                    self._release(request, entry.key)
