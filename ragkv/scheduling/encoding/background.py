"""Encodes missed chunks, and chunks behind others (`chained.py`), in the background, between requests."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from ragkv.runtime import openmp
from ragkv.scheduling import Activity
from ragkv.store import Entry, Store

from .chained import ChainedEntries
from .encoder import Encoder
from .scores import StoredScores
from .single_flight import SingleFlight

log = logging.getLogger(__name__)

Run = tuple[tuple[int, ...], ...]  # chunks, one behind the other

IDLE_PATIENCE_S = 30.0  # a background encoding waits at most so long for the engine to be idle


class BackgroundEncoder:
    """Encodes missed chunks, and scores chunks that were stored without scores.

    What waits is a run of chunks: one chunk to be encoded alone, or several, each to be encoded behind those before it.
    """

    def __init__(self, encoder: Encoder, store: Store, activity: Activity, chained: ChainedEntries) -> None:
        self._encoder, self._store, self._activity, self._chained = encoder, store, activity, chained
        self._scores = StoredScores(encoder, store)
        self.single_flight = SingleFlight(store)
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._wanted: set[Run] = set()  # queued or being encoded, and not forgotten since
        self._changed = threading.Condition()
        self._storing = False  # whether a chained entry is being stored, for which deletions wait
        self._closing = False
        self._flushing = 0  # calls of `flush` under way; meanwhile encoding does not wait for idle time
        self._thread = threading.Thread(target=self._work, name="ragkv-encoder", daemon=True)
        self._thread.start()

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Encode this chunk when there is time; once, however often it is added."""
        self._add((token_ids,))

    def add_chain(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Encode each of these chunks behind those before it when there is time, as far as that is not stored."""
        if len(chunks) > 1 and self._chained.made and len(self._chained.stored(chunks)) < len(chunks):
            self._add(tuple(chunks))

    def _add(self, run: Run) -> None:
        with self._changed:
            if self._closing or run in self._wanted:
                return
            self._wanted.add(run)
        self._queue.put(run)

    def forget(self, token_ids: tuple[int, ...]) -> None:
        """Do not encode this chunk, nor any behind it: it was deleted."""
        self._forget(lambda ids: ids == token_ids)

    def forget_keys(self, keys: Iterable[str]) -> None:
        """Do not encode the chunks whose entries have these keys: another replica deleted them."""
        if deleted := set(keys):
            self._forget(lambda ids: self._encoder.identity.key(ids) in deleted)

    def _forget(self, is_deleted: Callable[[tuple[int, ...]], bool]) -> None:
        """Drop every run that has a deleted chunk; then none of them is being stored."""
        with self._changed:
            self._wanted = {run for run in self._wanted if not any(map(is_deleted, run))}
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._storing)

    def flush(self) -> None:
        """Return when no chunk waits. Does not wait for requests to end."""
        openmp.release_threads()
        with self._changed:
            self._flushing += 1
            self._activity.wake()
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
        self._activity.wake()
        self._queue.put(None)
        if threading.current_thread() is self._thread:
            return False
        self._thread.join()
        return True

    def _work(self) -> None:
        while (run := self._queue.get()) is not None:
            self._activity.wait_idle(IDLE_PATIENCE_S, self._hurried)
            try:
                if len(run) == 1:
                    self._encode(*run)
                else:
                    self._encode_chain(run)
            except Exception:
                tokens = sum(map(len, run))
                log.exception("%d missed chunks of %d tokens could not be encoded; they stay a miss.", len(run), tokens)
            openmp.release_threads()  # the store's codec may have started some
            with self._changed:
                self._wanted.discard(run)
                self._changed.notify_all()

    def _encode_chain(self, run: Run) -> None:
        """Encode each chunk of `run` behind those before it, as far as that is not stored: one chunk a pass.

        A run whose RoPE frequencies change with its length is left out: no two of its prompts share them.
        """
        start, chained, pieces = len(self._encoder.prefix_ids), self._chained, list[torch.Tensor]()
        frequencies = self._encoder.frequencies(start + sum(map(len, run)))
        if frequencies != self._encoder.frequencies(start + len(run[0])):
            return
        for number, token_ids in enumerate(run):
            if run not in self._wanted:
                return
            before = run[:number]
            kv = chained.read(before, token_ids, frequencies)
            if kv is None:
                self._activity.wait_idle(IDLE_PATIENCE_S, self._hurried)
                with self._activity.acquire_for_encoding():
                    entry = chained.encode(before, pieces, token_ids)
                if before:
                    self._put_chained(run, entry)
                kv = entry.kv
            pieces.append(kv)

    def _put_chained(self, run: Run, entry: Entry) -> None:
        with self._changed:
            if run not in self._wanted:  # one of its chunks was deleted meanwhile
                return
            self._storing = True
        try:
            self._chained.put(entry)
        finally:
            with self._changed:
                self._storing = False
                self._changed.notify_all()

    def _encode(self, token_ids: tuple[int, ...]) -> None:
        if (token_ids,) not in self._wanted or self._complete(token_ids):
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
            with self._activity.acquire_for_encoding():
                entry = self._encoder.chunk(token_ids)
                scores = self._encoder.scores([entry])
            encoded = True
            self._put(token_ids, entry, scores)
        finally:
            if claim is not None:
                self.single_flight.finish(claim, encoded)

    def _score(self, token_ids: tuple[int, ...], entry: Entry) -> None:
        """Score a stored chunk from its KV, which stays as it is."""
        with self._activity.acquire_for_encoding():
            scores = self._encoder.scores([entry])
        self._put(token_ids, None, scores)

    def _put(self, token_ids: tuple[int, ...], entry: Entry | None, scores: Sequence[Entry]) -> None:
        with self._changed:
            if (token_ids,) not in self._wanted:  # deleted meanwhile
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
