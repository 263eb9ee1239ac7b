"""The waiting line as the store sees it, and the thread that makes ready for it (CachedAttention section 3.3.1).

What the first requests in line need is brought from slower tiers into the fastest, in the line's order, before they
start. The paper's window is `C_mem / S_kv` sessions, S_kv their mean size; as the sizes of what waits are known, ours
is exact: as many requests as fit into the fastest tier, less its reserve and less what started requests hold there.
A fetch evicts nothing that is in use, nor what a request before its own needs. A request that starts, or gives up, is
not fetched for any more: a fetch under way ends at the next layer. What cannot be fetched is not tried again for the
same request, which will find a miss.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence, Set

from ragkv.runtime import openmp

from .prefetch_hint import HintedEntry, PrefetchHint
from .tiers import Tier

log = logging.getLogger(__name__)

Fetch = Callable[[HintedEntry, Set[str], Callable[[], None]], bool]


class _Stopped(Exception):
    """Nobody waits for this fetch any more."""


class _Place:
    """A request in line."""

    def __init__(self, hint: PrefetchHint) -> None:
        self.hint = hint
        self.groups = hint.groups
        self.started = False
        self.gone = False
        self.missing: set[str] = set()  # keys that no tier could give


class Prefetcher:
    """The line, and the thread. All methods are thread-safe."""

    def __init__(self, tiers: Sequence[Tier], fetch: Fetch | None, reserve_bytes: int) -> None:
        """`fetch(wanted, spared, check)` brings an entry into `tiers[0]`; `False` if no tier has it.

        It evicts nothing of the groups `spared` and calls `check` between layers. `None`: nothing is fetched, the line
        is merely told to the tiers' policies. `reserve_bytes` of the fastest tier are left alone.
        """
        self._tiers, self._fetch, self._reserve_bytes = tuple(tiers), fetch, reserve_bytes
        self._line: list[_Place] = []  # in order of arrival; started ones stay until they leave
        self._version = self._seen = 0  # of the line, as it is and as the thread last looked at it
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="ragkv-prefetch", daemon=True)
        self.fetched = 0  # entries brought up
        if fetch is not None:
            self._thread.start()

    def queued(self, hint: PrefetchHint) -> None:
        """A request joined the tail of the line: what it needs is exempt from eviction, as far as the policy has it."""
        place = _Place(hint)
        with self._changed:
            self._line.append(place)
            for tier in self._tiers:
                tier.queued(place.groups)
            self._change()

    def started(self, hint: PrefetchHint) -> None:
        """It no longer waits; what it needs stays exempt until it leaves. Of one that is not in line: ignored."""
        with self._changed:
            place = self._find(hint)
            if place is not None:
                place.started = True
                self._change()

    def left(self, hint: PrefetchHint) -> None:
        """It was served, or gave up. Twice is harmless."""
        with self._changed:
            place = self._find(hint)
            if place is None:
                return
            place.gone = True
            before = self._line[: self._line.index(place)]
            places = [(group, sum(group in other.groups for other in before)) for group in place.groups]
            self._line.remove(place)
            for tier in self._tiers:
                tier.left(places)
            self._change()

    @property
    def waiting(self) -> int:
        """Requests in line, started ones among them."""
        with self._changed:
            return len(self._line)

    def close(self) -> None:
        """End the fetch under way at its next layer, and the thread. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._change()
        if self._fetch is not None:
            self._thread.join()

    def _change(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _find(self, hint: PrefetchHint) -> _Place | None:
        return next((place for place in self._line if place.hint is hint), None)

    def _work(self) -> None:
        openmp.use_one_thread()
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._version != self._seen)
                self._seen, line = self._version, list(self._line)
            try:
                for place, wanted, spared in self._window(line):
                    self._try(place, wanted, spared)
                    if self._version != self._seen:  # what is first in line may be another now
                        break
            except Exception:  # a store failure never fails a request
                log.exception("What waiting requests need could not be looked up; they will find it where it is.")

    def _window(self, line: Sequence[_Place]) -> Iterator[tuple[_Place, HintedEntry, Set[str]]]:
        """What is to be fetched, in order, and the groups that may not go for it."""
        fastest = self._tiers[0]
        room = fastest.stats().capacity_bytes - self._reserve_bytes
        counted: set[str] = set()
        spared: set[str] = set()
        for place in line:
            spared.update(place.groups)
            for wanted in place.hint.entries:
                here = fastest.contains(wanted.key)
                if wanted.key in counted or (not here and (place.started or wanted.key in place.missing)):
                    continue
                counted.add(wanted.key)
                room -= wanted.size_bytes
                if room < 0:
                    return
                if not here:
                    yield place, wanted, spared

    def _try(self, place: _Place, wanted: HintedEntry, spared: Set[str]) -> None:
        def check() -> None:
            if self._closing or place.started or place.gone:
                raise _Stopped

        assert self._fetch is not None
        found = False
        try:
            check()
            found = self._fetch(wanted, spared, check)
            self.fetched += found
        except _Stopped:
            return
        except Exception as error:  # damage among them: the tier has dropped the entry
            log.warning("Entry %s could not be fetched ahead: %s. It counts as a miss.", wanted.key[:12], error)
        if not found:
            place.missing.add(wanted.key)
