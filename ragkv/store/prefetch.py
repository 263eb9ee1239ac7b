"""Preparing memory for requests that wait in the queue (CachedAttention section 3.3.1).

The scheduler gives the store a `PrefetchHint` for every waiting request. A thread copies the
entries of the first requests from slower tiers into the fastest, in queue order, before the
requests start. The paper prefetches for `C_mem / S_kv` sessions, where S_kv is their mean size. The
hints name the exact sizes, so our window is exact: as many requests as fit into the fastest tier,
without the entries of started requests.

A fetch evicts nothing that is in use; what requests in front need is kept by the policy
`lookahead`. When a request starts or gives up, nothing more is fetched for it. An entry that cannot
be fetched is not tried again for the same request; that request will have a miss.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from .background import Background, Job
from .entry import Identity
from .key import EntryKey
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
