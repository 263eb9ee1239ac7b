"""Encodes missed chunks in the background, between requests."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

from ragkv.runtime import openmp
from ragkv.scheduling import Scheduler
from ragkv.store import Entry, EntryKey, Store

from .encoder import Encoder
from .scores import StoredScores
from .single_flight import SingleFlight

log = logging.getLogger(__name__)

IDLE_PATIENCE_S = 30.0  # a background encoding waits at most so long for the engine to be idle


class BackgroundEncoder:
    """Encodes missed chunks, and scores chunks that were stored without scores."""

    def __init__(self, encoder: Encoder, store: Store, scheduler: Scheduler) -> None:
        self._encoder, self._store, self._scheduler = encoder, store, scheduler
        self._scores = StoredScores(encoder, store)
        self.single_flight = SingleFlight(store)
        self._queue: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._wanted: set[tuple[int, ...]] = set()  # queued or being encoded, and not forgotten since
        self._changed = threading.Condition()
        self._closing = False
        self._flushing = 0  # calls of `flush` under way; meanwhile encoding does not wait for idle time
        self._thread = threading.Thread(target=self._work, name="ragkv-encoder", daemon=True)
        self._thread.start()

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Encode this chunk when there is time; once, however often it is added."""
        with self._changed:
            if self._closing or token_ids in self._wanted:
                return
            self._wanted.add(token_ids)
        self._queue.put(token_ids)

    def forget(self, token_ids: tuple[int, ...]) -> None:
        """Do not encode this chunk: it was deleted."""
        self._forget(lambda ids: ids == token_ids)

    def forget_keys(self, keys: Iterable[EntryKey]) -> None:
        """Do not encode the chunks whose entries have these keys: another replica deleted them."""
        if deleted := set(keys):
            self._forget(lambda ids: self._encoder.identity.key(ids) in deleted)

    def _forget(self, is_deleted: Callable[[tuple[int, ...]], bool]) -> None:
        """Drop every deleted chunk; none of them is being put, because that holds the lock too."""
        with self._changed:
            self._wanted = {ids for ids in self._wanted if not is_deleted(ids)}
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when no chunk waits. Does not wait for requests to end."""
        openmp.release_threads()
        with self._changed:
            self._flushing += 1
            self._scheduler.wake()
            self._changed.wait_for(lambda: not self._wanted)
            self._flushing -= 1

    def close(self) -> bool:
        """Finish the encoding under way and drop the others: they can be encoded when they are missed again.

        Garbage collection may call this on the encoder's own thread. Then it returns `False`, and the thread ends soon.
        """
        with self._changed:
            self._closing = True
            self._wanted.clear()
            self._changed.notify_all()
        self._scheduler.wake()
        self._queue.put(None)
        if threading.current_thread() is self._thread:
            return False
        self._thread.join()
        return True

    def _work(self) -> None:
        while (token_ids := self._queue.get()) is not None:
            self._scheduler.wait_idle(IDLE_PATIENCE_S, self._hurried)
            try:
                self._encode(token_ids)
            except Exception:
                log.exception("A missed chunk of %d tokens could not be encoded; it stays a miss.", len(token_ids))
            openmp.release_threads()  # the store's codec may have started some
            with self._changed:
                self._wanted.discard(token_ids)
                self._changed.notify_all()

    def _encode(self, token_ids: tuple[int, ...]) -> None:
        if token_ids not in self._wanted or self._complete(token_ids):
            return
        if (entry := self._scores.unscored(token_ids)) is not None:
            self._score(token_ids, entry)
            return
        key, tokens = self._encoder.identity.key(token_ids), len(token_ids)
        claim = self.single_flight.claim(key, tokens, lambda: bool(self._complete(token_ids)))
        if claim is None and self.single_flight.arrived(key, tokens, self._hurried) and self._complete(token_ids):
            return  # another replica encoded it; looking it up copied it to this replica
        encoded = False
        try:
            with self._scheduler.encoding_turn():
                entry = self._encoder.chunk(token_ids)
                scores = self._encoder.scores([entry])
            encoded = True
            self._put(token_ids, entry, scores)
        finally:
            if claim is not None:
                self.single_flight.finish(claim, encoded)

    def _score(self, token_ids: tuple[int, ...], entry: Entry) -> None:
        """Score a stored chunk from its KV, which stays as it is."""
        with self._scheduler.encoding_turn():
            scores = self._encoder.scores([entry])
        self._put(token_ids, None, scores)

    def _put(self, token_ids: tuple[int, ...], entry: Entry | None, scores: Sequence[Entry]) -> None:
        with self._changed:
            if token_ids not in self._wanted:  # deleted meanwhile
                return
            if entry is not None:
                self._store.put(entry)
            for own in scores:
                self._store.put_scores(own)

    def _hurried(self) -> bool:
        return self._closing or self._flushing > 0

    def _complete(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the chunk is stored, with scores if the encoder makes scores."""
        lease = self._store.lease(self._encoder.identity, token_ids)
        if lease is None:
            return False
        with lease:
            return not self._scores.lacking(token_ids)


__all__ = ["BackgroundEncoder"]
