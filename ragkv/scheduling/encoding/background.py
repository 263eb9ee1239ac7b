"""Encodes missed chunks in the background, between requests, and scores chunks that were stored without scores."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from ragkv.runtime import openmp
from ragkv.scheduling import Scheduler
from ragkv.store import EntryKey, Store

from .encoder import Encoder
from .scores import StoredScores

log = logging.getLogger(__name__)

IDLE_PATIENCE_S = 30.0  # `IDLE_PATIENCE_S` is how long a background encoding waits at most for the engine to be idle.


class BackgroundEncoder:
    """The chunks of one encoder that wait to be encoded or scored, in the order in which they came. Thread-safe.

    One thread begins a chunk while no request runs on the model, or when it waited for `IDLE_PATIENCE_S`.
    """

    def __init__(self, encoder: Encoder, store: Store, scheduler: Scheduler) -> None:
        self._encoder, self._store, self._scheduler = encoder, store, scheduler
        self._scores = StoredScores(encoder, store)
        self._waiting: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._current: tuple[int, ...] | None = None  # the chunk under way, unless it was forgotten since
        self._working = False
        self._closing = False
        self._flushing = 0  # calls of `flush` under way; meanwhile no chunk waits for idle time
        self._changed = threading.Condition()  # guards the fields above
        self._thread: threading.Thread | None = None

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Encode this chunk when there is time; once, however often it is added. After `close` nothing is added."""
        with self._changed:
            if self._closing:
                return
            self._waiting[token_ids] = None  # also if it is under way: it may have been deleted since that began
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ragkv-encoder", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forget(self, token_ids: tuple[int, ...]) -> None:
        """Do not encode this chunk: it was deleted."""
        self._forget(lambda ids: ids == token_ids)

    def forget_keys(self, keys: Iterable[EntryKey]) -> None:
        """Do not encode the chunks whose entries have these keys: another replica deleted them."""
        if deleted := set(keys):
            self._forget(lambda ids: self._encoder.identity.key(ids) in deleted)

    def flush(self) -> None:
        """Return when no chunk waits. Does not wait for requests to end."""
        openmp.release_threads()
        with self._changed:
            self._flushing += 1
            self._scheduler.wake()
            self._changed.wait_for(lambda: self._closing or not (self._waiting or self._working))
            self._flushing -= 1

    def close(self) -> bool:
        """Finish the chunk under way, and drop what waits: it can be encoded when it is missed again.

        Garbage collection may call this on the encoder's own thread. Then it returns `False`, and the thread ends soon.
        """
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._current = None
            self._changed.notify_all()
        self._scheduler.wake()
        if threading.current_thread() is self._thread:
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def _forget(self, is_deleted: Callable[[tuple[int, ...]], bool]) -> None:
        with self._changed:
            for token_ids in [token_ids for token_ids in self._waiting if is_deleted(token_ids)]:
                del self._waiting[token_ids]
            if self._current is not None and is_deleted(self._current):
                self._current = None
            self._changed.notify_all()

    def _run(self) -> None:
        while (token_ids := self._next()) is not None:
            try:
                self._encode(token_ids)
            except Exception:
                log.exception("A missed chunk of %d tokens could not be encoded; it stays a miss.", len(token_ids))
            openmp.release_threads()
            with self._changed:
                self._working, self._current = False, None
                self._changed.notify_all()

    def _next(self) -> tuple[int, ...] | None:
        """The next chunk once it may begin; `None` when this is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
            self._scheduler.wait_idle(IDLE_PATIENCE_S, lambda: self._closing or self._flushing > 0)
            with self._changed:
                if self._closing:
                    return None
                if self._waiting:  # otherwise it was forgotten meanwhile
                    self._working = True
                    self._current, _ = self._waiting.popitem(last=False)
                    return self._current

    def _encode(self, token_ids: tuple[int, ...]) -> None:
        if self._complete(token_ids):
            return
        entry = self._scores.unscored(token_ids)
        lacks_kv = entry is None
        with self._scheduler.encoding_turn():
            entry = entry or self._encoder.chunk(token_ids)
            scores = self._encoder.scores([entry])
        with self._changed:  # so that it is not forgotten while it is put
            if self._current != token_ids:  # deleted meanwhile
                return
            if lacks_kv:
                self._store.put(entry)
            for own in scores:
                self._store.put_scores(own)

    def _complete(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the chunk is stored, with scores if the encoder makes scores."""
        lease = self._store.lease(self._encoder.identity, token_ids)
        if lease is None:
            return False
        with lease:
            return not self._scores.lacking(token_ids)


__all__ = ["BackgroundEncoder"]
