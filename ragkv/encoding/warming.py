"""Chunks encoded at once, on the caller's thread, until their entries are durable."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ragkv.errors import QueueError
from ragkv.runtime import Check, no_check, openmp
from ragkv.scheduling import Activity
from ragkv.store import Store

from .encoder import Encoder
from .single_flight import EncodingClaim, SingleFlight


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What `Engine.warm` did."""

    encoded: int  # chunks computed and stored now
    present: int  # chunks that were stored already
    failed: int  # chunks that could not be stored: see the log
    left: int = 0  # chunks not reached, because a deadline or a cancellation ended the work


class Warmer:
    """Encodes chunks for one engine. Replicas that warm the same chunks at once encode each of them once."""

    def __init__(self, encoder: Encoder, store: Store, activity: Activity, single_flight: SingleFlight) -> None:
        self._encoder, self._store, self._activity, self._single_flight = encoder, store, activity, single_flight

    def warm(
        self,
        chunks: Sequence[tuple[int, ...]],
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
    ) -> WarmReport:
        """Encode and store the chunks, given by their token ids, that are not stored; returns when all are durable.

        A `QueueError` that `check` raises before a chunk ends the work; the report counts the chunks that are left.
        """
        waiting, postponed = deque(chunks), set[tuple[int, ...]]()
        identity, single_flight = self._encoder.identity, self._single_flight
        encoded = present = failed = 0
        while waiting and _goes_on(check):
            token_ids = waiting.popleft()
            key, tokens = identity.key(token_ids), len(token_ids)
            is_stored = partial(self._store.ensure_durable, identity, token_ids)
            if is_stored():
                present += 1
            else:
                claim = single_flight.claim(key, tokens, is_stored)
                if claim is None and token_ids not in postponed:  # another replica encodes it: take the others first
                    postponed.add(token_ids)
                    waiting.append(token_ids)
                    continue
                if claim is None and single_flight.arrived(key, tokens) and is_stored():
                    present += 1
                else:
                    stored = self._encode(token_ids, chunks, claim)
                    encoded, failed = encoded + stored, failed + (not stored)
            if on_progress:
                on_progress(len(chunks) - len(waiting), len(chunks))
        openmp.release_threads()  # encoding entries in the store's codec may have started some
        self._store.flush()  # entries that were present may still wait to be written
        return WarmReport(encoded, present, failed, left=len(waiting))

    def _encode(
        self, token_ids: tuple[int, ...], chunks: Sequence[tuple[int, ...]], claim: EncodingClaim | None
    ) -> bool:
        """Compute the entry of one of `chunks` and store it durably; whether that succeeded."""
        stored = False
        try:
            with self._activity.acquire_for_encoding():
                self._encoder.register(chunks)
                entry = self._encoder.chunk(token_ids)
            stored = self._store.put_durably(entry)
        finally:
            if claim is not None:
                self._single_flight.finish(claim, stored)
        return stored


def _goes_on(check: Check) -> bool:
    """Whether `check` lets the work go on."""
    try:
        check()
    except QueueError:
        return False
    return True


__all__ = ["WarmReport", "Warmer"]
