"""Chunks encoded at once, on the caller's thread, several at a time, until their entries are
durable.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ragkv.errors import QueueError
from ragkv.runtime import Check, Rate, no_check, openmp, stop_of
from ragkv.scheduling import Scheduler
from ragkv.store import Store

from .background import LOG_EVERY_S
from .encoder import Encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What `Engine.warm` did."""

    encoded: int  # chunks computed and stored now
    present: int  # chunks that were stored already
    failed: int  # chunks that could not be stored: see the log
    # chunks not reached: the time, the store's room or a cancellation ended the work, or it goes on
    left: int = 0
    bytes_per_token: int = 0  # of stored KV


class Warmer:
    """Encodes chunks for one engine."""

    def __init__(self, encoder: Encoder, store: Store, scheduler: Scheduler) -> None:
        self._encoder = encoder
        self._store = store
        self._scheduler = scheduler

    def warm(
        self,
        chunks: Sequence[tuple[int, ...]],
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
        evict: bool = True,
    ) -> WarmReport:
        """Encode and store the chunks, given by their token ids, that are not stored, each given
        once.

        Returns when all are durable. A `QueueError` that `check` raises before a chunk ends the
        work; the report counts the chunks that are left. Without `evict` chunks for which the store
        has no room are left, too. What stops `check` ends the batch under way between two layers, too.
        """
        done = _Progress(len(chunks), on_progress)
        batch = list[tuple[int, ...]]()
        with suppress(QueueError):
            for token_ids in chunks:
                check()
                if batch and sum(map(len, batch)) + len(token_ids) > self._encoder.batch_tokens:
                    self._encode(batch, done, stop_of(check))
                is_stored = self._store.ensure_durable(self._encoder.identity, token_ids)
                needed = self._encoder.entry_bytes(sum(map(len, batch)) + len(token_ids))
                if is_stored:
                    done.count(Counter(present=1))
                elif evict or self._store.room_bytes() >= needed:
                    batch.append(token_ids)
            if batch:
                check()
                self._encode(batch, done, stop_of(check))
        openmp.release_threads()  # encoding entries in the store's codec may have started some
        self._store.flush()  # entries that were present may still wait to be written
        counts = done.counts
        counted = (counts["encoded"], counts["present"], counts["failed"], done.left)
        return WarmReport(*counted, self._encoder.bytes_per_token)

    def _encode(self, batch: list[tuple[int, ...]], done: "_Progress", stop: Check) -> None:
        """Compute the entries of the batch, and store them durably; then it is empty."""
        with self._scheduler.encoding_turn():
            entries = self._encoder.chunks(batch, stop)
        counts = Counter[str]()
        for entry in entries:
            is_stored = self._store.put_durably(entry)
            counts["encoded" if is_stored else "failed"] += 1
        done.count(counts)
        batch.clear()


class _Progress:
    """Counts of one call of `warm`."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._on_progress = on_progress
        self.counts = Counter[str]()
        self.left = total
        self._rate = Rate()
        self._logged_s = time.monotonic()
        self._rate.update(0, total)

    def count(self, more: Counter[str]) -> None:
        """Report more chunks that are stored or failed, to the caller and sometimes to the log."""
        self.counts += more
        self.left -= more.total()
        done = self._total - self.left
        total = self._total
        self._rate.update(done, total)
        if self._on_progress:
            self._on_progress(done, total)
        if (now := time.monotonic()) - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now
            log.info(
                "Computing KV: %d of %d chunks, %.1f/s%s.",
                done,
                total,
                self._rate.per_s,
                self._rate.left,
            )
