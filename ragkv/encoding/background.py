"""Missed chunks encoded in the background, in gaps between requests, on one thread."""

import logging
import queue
import threading
from contextlib import suppress

from ragkv.errors import StoreReadOnlyError
from ragkv.runtime import openmp
from ragkv.scheduling import Activity
from ragkv.store import Entry, Store

from .encoder import Encoder
from .single_flight import SingleFlight

log = logging.getLogger(__name__)

IDLE_PATIENCE_S = 30.0  # a background encoding waits so long for the engine to be idle, then goes ahead


class BackgroundEncoder:
    """Encodes missed chunks, and scores those stored unscored, in gaps between requests, on one thread."""

    def __init__(self, encoder: Encoder, store: Store, activity: Activity) -> None:
        self._encoder, self._store, self._activity = encoder, store, activity
        self.single_flight = SingleFlight(store)
        self._waiting: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._known: set[tuple[int, ...]] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._flushing = 0  # calls of `flush` under way: no patience then
        self._thread = threading.Thread(target=self._work, name="ragkv-encoder", daemon=True)
        self._thread.start()

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Encode these tokens when there is time; once, however often they are asked for."""
        with self._changed:
            if self._closing or token_ids in self._known:
                return
            self._known.add(token_ids)
        self._waiting.put(token_ids)

    def forget(self, token_ids: tuple[int, ...]) -> None:
        """Do not encode these after all: their chunk was deleted."""
        with self._changed:
            self._known.discard(token_ids)

    def flush(self) -> None:
        """Return when nothing waits any more. Does not wait for requests to end."""
        openmp.release_threads()
        with self._changed:
            self._flushing += 1
            self._activity.wake()
            self._changed.wait_for(lambda: not self._known)
            self._flushing -= 1

    def close(self) -> bool:
        """Finish the encoding under way, drop the rest: it can be encoded when it is missed again.

        `False` if this is its own thread, where garbage collection may call: it then ends by itself, soon.
        """
        with self._changed:
            self._closing = True
            self._known.clear()
            self._changed.notify_all()
        self._activity.wake()
        self._waiting.put(None)
        if threading.current_thread() is self._thread:
            return False
        self._thread.join()
        return True

    def _work(self) -> None:
        while (token_ids := self._waiting.get()) is not None:
            self._activity.wait_idle(IDLE_PATIENCE_S, lambda: self._closing or self._flushing > 0)
            try:
                self._encode(token_ids)
            except Exception:
                log.exception("A missed chunk of %d tokens could not be encoded; it stays a miss.", len(token_ids))
            openmp.release_threads()  # the store's codec may have made one
            with self._changed:
                self._known.discard(token_ids)
                self._changed.notify_all()

    def _encode(self, token_ids: tuple[int, ...]) -> None:
        if token_ids not in self._known or self._scored(token_ids):
            return
        key, tokens = self._encoder.identity.key(token_ids), len(token_ids)
        flight = self.single_flight.claim(key, tokens, lambda: bool(self._scored(token_ids)))
        if flight is None and self.single_flight.arrived(key, tokens, self._hurried) and self._scored(token_ids):
            return  # another replica's; looking at it brought it here
        encoded = False
        try:
            with self._activity.lock:
                entry = self._encoder.chunk(token_ids)
            encoded = True
            self._keep(token_ids, entry)
        finally:
            if flight is not None:
                self.single_flight.finish(flight, encoded)

    def _keep(self, token_ids: tuple[int, ...], entry: Entry) -> None:
        scored = self._scored(token_ids)  # warmed meanwhile?
        if scored is False:
            with suppress(StoreReadOnlyError):
                self._store.delete_key(entry.info.key)  # the same KV without scores
        with self._changed:
            if token_ids in self._known and not scored:  # not deleted meanwhile
                self._store.put(entry)

    def _hurried(self) -> bool:
        return self._closing or self._flushing > 0

    def _scored(self, token_ids: tuple[int, ...]) -> bool | None:
        """Whether the stored entry has all that the encoder would give it; `None` if there is none."""
        lease = self._store.lease(self._encoder.identity, token_ids)
        if lease is None:
            return None
        with lease:
            return lease.sensitivity is not None or not self._encoder.scores


__all__ = ["BackgroundEncoder"]
