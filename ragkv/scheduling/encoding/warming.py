"""Chunks encoded at once, on the caller's thread, several at a time, until their entries are durable."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

from ragkv.errors import QueueError
from ragkv.runtime import Check, Rate, no_check, openmp
from ragkv.scheduling import Scheduler
from ragkv.store import Entry, Store

from .encoder import Encoder
from .scores import StoredScores
from .single_flight import EncodingClaim, SingleFlight

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0  # `LOG_EVERY_S` is how often progress is logged at most.


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What `Engine.warm` did."""

    encoded: int  # chunks computed and stored now
    present: int  # chunks that were stored already
    failed: int  # chunks that could not be stored: see the log
    left: int = 0  # chunks not reached, because a deadline or a cancellation ended the work
    scored: int = 0  # chunks that were stored already and got scores now


class Warmer:
    """Encodes chunks for one engine. Replicas that warm the same chunks at once encode each of them once."""

    def __init__(self, encoder: Encoder, store: Store, scheduler: Scheduler, single_flight: SingleFlight) -> None:
        self._encoder, self._store, self._scheduler, self._single_flight = encoder, store, scheduler, single_flight
        self._scores = StoredScores(encoder, store)

    def warm(
        self,
        chunks: Sequence[tuple[int, ...]],
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
    ) -> WarmReport:
        """Encode and store the chunks, given by their token ids, that are not stored; returns when all are durable.

        A `QueueError` that `check` raises before a chunk ends the work; the report counts the chunks that are left.
        """
        work = _Warming(chunks, on_progress)
        try:
            while work.unfinished and _goes_on(check):
                if not self._take(work):
                    self._encode(work)
        finally:
            for waiting in work.batch:
                self._finish(waiting.claim, encoded=False)
        openmp.release_threads()  # encoding entries in the store's codec may have started some
        self._store.flush()  # entries that were present may still wait to be written
        return WarmReport(work.encoded, work.present, work.failed, left=work.unfinished, scored=work.scored)

    def _take(self, work: "_Warming") -> bool:
        """Count the next chunk if it is stored, else add it to the batch. `False`: the batch must be encoded first."""
        if not work.waiting or not work.fits(self._encoder.batch_tokens):
            return False
        token_ids = work.waiting[0]
        key, tokens = self._encoder.identity.key(token_ids), len(token_ids)
        is_stored = partial(self._store.ensure_durable, self._encoder.identity, token_ids)
        if is_stored():
            self._take_present(work)
            return True
        claim = self._single_flight.claim(key, tokens, is_stored)
        if claim is None and token_ids not in work.postponed:  # another replica encodes it: take the others first
            work.postpone()
            return True
        if claim is None and work.batch:
            return False
        if claim is None and self._single_flight.arrived(key, tokens) and is_stored():
            self._take_present(work)
            return True
        work.batch.append(_Waiting(work.waiting.popleft(), claim))
        return True

    def _take_present(self, work: "_Warming") -> None:
        """The next chunk is stored. If it lacks scores, it joins the batch, to be scored from its KV."""
        entry = self._scores.unscored(work.waiting[0])
        if entry is None:
            work.take_present()
        else:
            work.batch.append(_Waiting(work.waiting.popleft(), None, entry))

    def _encode(self, work: "_Warming") -> None:
        """Compute the entries and scores that the batch lacks, and store them durably."""
        batch = tuple(work.batch)
        with self._scheduler.encoding_turn():
            self._encoder.register(work.chunks)
            made = iter(self._encoder.chunks([waiting.token_ids for waiting in batch if waiting.entry is None]))
            entries = [waiting.entry or next(made) for waiting in batch]
            scores = self._encoder.scores(entries)
        for entry, own in zip_longest(entries, scores):
            waiting = work.batch.popleft()
            stored = waiting.entry is not None or self._store_entry(entry, waiting.claim)
            if own is not None and stored:
                self._store.put_scores(own, durably=True)
            if waiting.entry is None:
                work.count_encoded(stored)
            else:
                work.count_scored()

    def _store_entry(self, entry: Entry, claim: EncodingClaim | None) -> bool:
        stored = False
        try:
            stored = self._store.put_durably(entry)
        finally:
            self._finish(claim, stored)
        return stored

    def _finish(self, claim: EncodingClaim | None, encoded: bool) -> None:
        if claim is not None:
            self._single_flight.finish(claim, encoded)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A chunk of a batch."""

    token_ids: tuple[int, ...]
    claim: EncodingClaim | None
    entry: Entry | None = None  # its stored entry, if it lacks nothing but scores


@dataclass(slots=True)
class _Warming:
    """One call of `warm`."""

    chunks: Sequence[tuple[int, ...]]
    on_progress: Callable[[int, int], None] | None
    waiting: deque[tuple[int, ...]] = field(init=False)  # not looked up yet, or postponed
    batch: deque[_Waiting] = field(default_factory=deque)  # encoded together next
    postponed: set[tuple[int, ...]] = field(default_factory=set)
    encoded: int = 0
    present: int = 0
    failed: int = 0
    scored: int = 0
    rate: Rate = field(default_factory=Rate)
    logged_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.waiting = deque(self.chunks)
        self.rate.update(0, len(self.chunks))

    @property
    def unfinished(self) -> int:
        """How many chunks are neither stored nor failed."""
        return len(self.waiting) + len(self.batch)

    def fits(self, batch_tokens: int) -> bool:
        """Whether the next chunk can join the batch."""
        tokens = sum(len(waiting.token_ids) for waiting in self.batch)
        return not self.batch or tokens + len(self.waiting[0]) <= batch_tokens

    def postpone(self) -> None:
        """Look the next chunk up again when all others were."""
        self.postponed.add(self.waiting[0])
        self.waiting.rotate(-1)

    def take_present(self) -> None:
        """The next chunk is stored."""
        self.waiting.popleft()
        self.present += 1
        self._tell()

    def count_scored(self) -> None:
        """A chunk that was taken from the batch was stored before, and has scores now."""
        self.present, self.scored = self.present + 1, self.scored + 1
        self._tell()

    def count_encoded(self, stored: bool) -> None:
        """A chunk that was taken from the batch was encoded; whether it is stored."""
        self.encoded, self.failed = self.encoded + stored, self.failed + (not stored)
        self._tell()

    def _tell(self) -> None:
        total = len(self.chunks)
        done = total - self.unfinished
        self.rate.update(done, total)
        if self.on_progress:
            self.on_progress(done, total)
        if (now := time.monotonic()) - self.logged_s >= LOG_EVERY_S:
            self.logged_s = now
            log.info("Encoding KV: %d of %d chunks, %.1f/s%s.", done, total, self.rate.per_s, self.rate.left)


def _goes_on(check: Check) -> bool:
    """Whether `check` lets the work go on."""
    try:
        check()
    except QueueError:
        return False
    return True


__all__ = ["WarmReport", "Warmer"]
