"""Encodes missed chunks in the background, between requests, and scores chunks that were stored without scores."""

import logging
from collections.abc import Iterable, Sequence

from ragkv.scheduling import IdleWorker, Scheduler
from ragkv.store import Entry, EntryKey, Store

from .encoder import Encoder
from .scores import StoredScores
from .single_flight import SingleFlight

log = logging.getLogger(__name__)

IDLE_PATIENCE_S = 30.0  # `IDLE_PATIENCE_S` is how long a background encoding waits at most for the engine to be idle.


class BackgroundEncoder:
    """The chunks of one encoder that wait to be encoded or scored. Thread-safe."""

    def __init__(self, encoder: Encoder, store: Store, scheduler: Scheduler) -> None:
        self._encoder, self._store, self._scheduler = encoder, store, scheduler
        self._scores = StoredScores(encoder, store)
        self.single_flight = SingleFlight(store)
        self._worker = IdleWorker[tuple[int, ...], tuple[int, ...]](
            scheduler, "ragkv-encoder", self._work, IDLE_PATIENCE_S
        )

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Encode this chunk when there is time; once, however often it is added."""
        self._worker.add(token_ids, token_ids)

    def forget(self, token_ids: tuple[int, ...]) -> None:
        """Do not encode this chunk: it was deleted."""
        self._worker.forget(lambda ids: ids == token_ids)

    def forget_keys(self, keys: Iterable[EntryKey]) -> None:
        """Do not encode the chunks whose entries have these keys: another replica deleted them."""
        if deleted := set(keys):
            self._worker.forget(lambda ids: self._encoder.identity.key(ids) in deleted)

    def flush(self) -> None:
        """Return when no chunk waits. Does not wait for requests to end."""
        self._worker.flush()

    def close(self) -> bool:
        """Drop what waits: it can be encoded when it is missed again. `False` on the encoder's own thread."""
        return self._worker.close()

    def _work(self, token_ids: tuple[int, ...]) -> bool:
        try:
            self._encode(token_ids)
        except Exception:
            log.exception("A missed chunk of %d tokens could not be encoded; it stays a miss.", len(token_ids))
        return True

    def _encode(self, token_ids: tuple[int, ...]) -> None:
        if self._complete(token_ids):
            return
        if (entry := self._scores.unscored(token_ids)) is not None:
            self._score(token_ids, entry)
            return
        key, tokens = self._encoder.identity.key(token_ids), len(token_ids)
        claim = self.single_flight.claim(key, tokens, lambda: bool(self._complete(token_ids)))
        arrived = claim is None and self.single_flight.arrived(key, tokens, lambda: self._worker.hurried)
        if arrived and self._complete(token_ids):
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
        with self._worker.wanted(token_ids) as wanted:
            if not wanted:  # deleted meanwhile
                return
            if entry is not None:
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
