"""Chunks encoded at once, on the caller's thread, several at a time, until their entries are durable."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ragkv.errors import QueueError
from ragkv.runtime import Check, Rate, no_check, openmp
from ragkv.scheduling import Scheduler
from ragkv.store import Entry, Store

from .encoder import Encoder
from .scores import StoredScores

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
    """Encodes chunks for one engine."""

    def __init__(self, encoder: Encoder, store: Store, scheduler: Scheduler) -> None:
        self._encoder, self._store, self._scheduler = encoder, store, scheduler
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
            for token_ids in chunks:
                check()
                if work.batch and work.batch_tokens + len(token_ids) > self._encoder.batch_tokens:
                    self._encode(work)
                if not self._store.ensure_durable(self._encoder.identity, token_ids):
                    work.batch.append(_Lacking(token_ids))
                elif (entry := self._scores.unscored(token_ids)) is not None:
                    work.batch.append(_Lacking(token_ids, entry))
                else:
                    work.count(present=1)
            if work.batch:
                check()
                self._encode(work)
        except QueueError:
            log.debug("%d chunks are left.", work.left)
        openmp.release_threads()  # encoding entries in the store's codec may have started some
        self._store.flush()  # entries that were present may still wait to be written
        return WarmReport(work.encoded, work.present, work.failed, left=work.left, scored=work.scored)

    def _encode(self, work: "_Warming") -> None:
        """Compute the entries and scores that the batch lacks, and store them durably."""
        batch, work.batch = work.batch, []
        with self._scheduler.encoding_turn():
            self._encoder.register(work.chunks)
            made = iter(self._encoder.chunks([lacking.token_ids for lacking in batch if lacking.entry is None]))
            entries = [lacking.entry or next(made) for lacking in batch]
            scores = self._encoder.scores(entries)
        for lacking, entry, own in zip_longest(batch, entries, scores):
            stored = lacking.entry is not None or self._store.put_durably(entry)
            if own is not None and stored:
                self._store.put_scores(own, durably=True)
            if lacking.entry is not None:
                work.count(present=1, scored=1)
            else:
                work.count(encoded=int(stored), failed=int(not stored))


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A chunk of a batch."""

    token_ids: tuple[int, ...]
    entry: Entry | None = None  # its stored entry, if it lacks nothing but scores


@dataclass(slots=True)
class _Warming:
    """One call of `warm`."""

    chunks: Sequence[tuple[int, ...]]
    on_progress: Callable[[int, int], None] | None
    batch: list[_Lacking] = field(default_factory=list)  # encoded together next
    encoded: int = 0
    present: int = 0
    failed: int = 0
    scored: int = 0
    rate: Rate = field(default_factory=Rate)
    logged_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.rate.update(0, len(self.chunks))

    @property
    def left(self) -> int:
        """How many chunks are neither stored nor failed."""
        return len(self.chunks) - self.encoded - self.present - self.failed

    @property
    def batch_tokens(self) -> int:
        """How many tokens the batch has."""
        return sum(len(lacking.token_ids) for lacking in self.batch)

    def count(self, *, encoded: int = 0, present: int = 0, failed: int = 0, scored: int = 0) -> None:
        """One more chunk is stored, or failed: tell the caller and, now and then, the log."""
        self.encoded, self.present = self.encoded + encoded, self.present + present
        self.failed, self.scored = self.failed + failed, self.scored + scored
        total = len(self.chunks)
        done = total - self.left
        self.rate.update(done, total)
        if self.on_progress:
            self.on_progress(done, total)
        if (now := time.monotonic()) - self.logged_s >= LOG_EVERY_S:
            self.logged_s = now
            log.info("Encoding KV: %d of %d chunks, %.1f/s%s.", done, total, self.rate.per_s, self.rate.left)


__all__ = ["WarmReport", "Warmer"]
