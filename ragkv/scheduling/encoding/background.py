"""Encodes missed chunks in the background, between requests."""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ragkv.runtime import Check, Claim, begun, openmp
from ragkv.runtime.waiting import POLL_S
from ragkv.scheduling import IdleTime
from ragkv.store.entry import EntryKey
from ragkv.store.store import Store

from .encoder import Encoder

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0  # progress is logged no more often
IDLE_PATIENCE_S = 30.0  # a chunk waits no longer for the engine to be idle
# So many chunks that requests missed wait at most. Their tokens take about 80 MB at 512 a chunk.
MOST_WAITING = 4096


_Ids = tuple[int, ...]  # the ids of a chunk whose entry is to be made


@dataclass(eq=False)
class BackgroundEncoder:
    """The chunks of one encoder that wait to be encoded, in the order in which they came.

    One thread begins a chunk while no request runs on the model, when a request needs it, or when
    it waited for `IDLE_PATIENCE_S`. First come those that requests missed, then those of new
    documents, which evict nothing.
    """

    encoder: Encoder
    store: Store
    idle_time: IdleTime
    # the fields below are guarded by this
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _waiting: OrderedDict[_Ids, None] = field(default_factory=OrderedDict, init=False)
    # encoded when nothing else waits
    _last: OrderedDict[_Ids, None] = field(default_factory=OrderedDict, init=False)
    # what is under way, unless it was cancelled since
    _current: _Ids | None = field(default=None, init=False)
    _was_missed: bool = field(default=False, init=False)  # whether a request missed it
    _closing: bool = field(default=False, init=False)
    _logged_s: float = field(default_factory=time.monotonic, init=False)
    # how many requests wait for each chunk
    _wanted: Counter[_Ids] = field(default_factory=Counter, init=False)
    # chunks that did not fit among those that wait
    _dropped: int = field(default=0, init=False)
    # calls of `flush` under way; meanwhile no chunk waits for idle time
    _flushing: int = field(default=0, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def add(self, token_ids: tuple[int, ...], *, last: bool = False) -> None:
        """Encode this chunk when there is time; once, however often it is added. After `close`
        nothing is added.

        With `last` it waits for all that requests missed, and is not encoded if the store has no
        room for it then. If too many wait of one kind, the oldest of it is dropped.
        """
        with self._changed:
            if self._closing or not self.store.tiers:  # nothing could keep the entry
                return
            waiting = self._last if last else self._waiting
            waiting[token_ids] = None  # also if it is under way: it may have been deleted since
            self._drop_oldest(waiting)
            if self._thread is None:
                self._thread = self._started()
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether a chunk waits or is under way."""
        with self._changed:
            return bool(self._open())

    def cancel(self, keys: Iterable[EntryKey]) -> None:
        """Do not encode the chunks whose entries have these keys: they were deleted."""
        deleted = set(keys)
        key = self.encoder.identity.key
        with self._changed:
            for waiting in (self._waiting, self._last):
                for ids in [one for one in waiting if key(one) in deleted]:
                    del waiting[ids]
            if self._current is not None and key(self._current) in deleted:
                self._current = None
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when what was added before is encoded. Later chunks are not waited for, nor the
        end of requests: while questions keep missing, some chunk may always wait.
        """
        openmp.release_threads()
        with self._changed:
            left = self._open()

            def is_done() -> bool:
                left.intersection_update(self._open())
                return self._closing or not left

            self._flushing += 1
            self.idle_time.wake()
            try:
                self._changed.wait_for(is_done)
            finally:
                self._flushing -= 1

    def settle(self, claim: Claim) -> None:
        """Return when no chunk waits that a request missed, when a request runs, or when `claim` is
        over.

        After this the next question finds stored what the last one missed, unless they came
        together.
        """
        openmp.release_threads()
        with self._changed:
            while (self._waiting or self._was_missed) and not (
                self._closing or self.idle_time.busy or claim.is_over
            ):
                self._changed.wait(POLL_S)

    def encode_first(self, chunks: Iterable[_Ids], check: Check) -> bool:
        """Encode those of `chunks` that wait, and return when they are stored: whether any did.
        Raises what `check` raises.

        So a chunk that two requests miss is computed in place once, and encoded once.
        """
        with self._changed:
            wanted = [one for one in chunks if one in self._waiting or one == self._current]
            for one in wanted:
                if one in self._waiting:
                    self._waiting.move_to_end(one, last=False)
            self._wanted.update(wanted)
            self._flushing += bool(wanted)
            self.idle_time.wake()
            try:
                while not self._changed.wait_for(
                    lambda: (
                        self._closing
                        or not any(one in self._waiting or one == self._current for one in wanted)
                    ),
                    POLL_S,
                ):
                    check()
            finally:
                self._wanted.subtract(wanted)
                self._wanted = +self._wanted
                self._flushing -= bool(wanted)
        return bool(wanted)

    def close(self) -> bool:
        """Finish the chunk under way, and drop what waits: it can be encoded when it is missed
        again.

        Garbage collection may call this on the encoder's own thread. Then it returns `False`, and
        the thread ends soon.
        """
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._last.clear()
            self._current = None
            self._changed.notify_all()
            thread = self._thread
        self.idle_time.wake()
        if threading.current_thread() is thread:
            return False
        if thread is not None:
            thread.join()
        return True

    def _open(self) -> set[_Ids]:
        """The chunks that wait or are under way, but for those that were forgotten. The
        caller holds `_changed`.
        """
        current = () if self._current is None else (self._current,)
        return {*self._waiting, *self._last, *current}

    def _started(self) -> threading.Thread | None:
        """The thread, begun. Without one, what waits stays a miss. The caller holds `_changed`."""
        thread = begun(self._run, "ragkv-encoder", "missed chunks stay misses")
        if thread is None:
            self._waiting.clear()
            self._last.clear()
        return thread

    def _drop_oldest(self, waiting: OrderedDict[_Ids, None]) -> None:
        """Keep what waits within `MOST_WAITING`; a dropped chunk stays a miss. One for which a
        request waits is kept.
        """
        if len(waiting) <= MOST_WAITING:
            return
        oldest = next((one for one in waiting if one not in self._wanted), None)
        if oldest is None:
            return
        del waiting[oldest]
        if not self._dropped:
            log.warning(
                "%d chunks wait for KV. From now on the oldest are dropped: they stay misses.",
                MOST_WAITING,
            )
        self._dropped += 1

    def _run(self) -> None:
        try:
            self._encode_all()
        except Exception:
            log.exception("KV in the background: what waits is dropped, and stays a miss.")
            with self._changed:  # nobody may wait for this thread; the next chunk starts another
                self._waiting.clear()
                self._last.clear()
                self._thread = None
                self._changed.notify_all()

    def _encode_all(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                self._encode(wanted)
            except Exception:
                tokens = len(wanted)
                log.exception(
                    "A missed chunk of %d tokens could not be encoded; it stays a miss.", tokens
                )
            finally:
                self._ended()
            openmp.release_threads()

    def _ended(self) -> None:
        """Nothing is under way any more: those that wait for it may go on."""
        with self._changed:
            self._was_missed = False
            self._current = None
            self._changed.notify_all()  # they run once this lock is free
            if self._dropped and not self._waiting:
                log.warning("%d chunks were dropped: too many waited.", self._dropped)
                self._dropped = 0
            if self._last and (now := time.monotonic()) - self._logged_s >= LOG_EVERY_S:
                self._logged_s = now
                log.info("KV in the background: %d chunks wait.", len(self._last))

    def _next(self) -> _Ids | None:
        """The next one once it may begin; `None` when this is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._last or self._closing)
            self.idle_time.wait_idle(IDLE_PATIENCE_S, lambda: self._closing or self._flushing > 0)
            with self._changed:
                if self._closing:
                    return None
                new = None if self._waiting else next(iter(self._last), None)
                if new and self.store.durable.room_bytes() < self.encoder.entry_bytes(len(new)):
                    log.warning(
                        "The store is full: %d chunks get KV when a question needs them.",
                        len(self._last),
                    )
                    self._last.clear()  # nothing is evicted for what no question needed yet
                    self._changed.notify_all()
                if waiting := self._waiting or self._last:  # otherwise it was cancelled meanwhile
                    self._was_missed = waiting is self._waiting
                    self._current, _ = waiting.popitem(last=False)
                    return self._current

    def _encode(self, wanted: _Ids) -> None:
        if self._is_stored(wanted):
            return
        with self.idle_time.encoding():
            (entry,) = self.encoder.chunks([wanted])
        # takes a while, and a request may need the lock below
        stored = self.store.stored_form(entry)
        with self._changed:  # so that it is not cancelled while it is put
            if self._current != wanted:  # deleted meanwhile
                return
            self.store.put(stored)

    def _is_stored(self, wanted: _Ids) -> bool:
        """Whether the entry is stored and sound."""
        lease = self.store.lease(self.encoder.identity, wanted)
        if lease is None:
            return False
        lease.close()
        return True
