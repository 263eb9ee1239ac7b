"""Scores stored chunks with a new network, from the KV that is there, while requests are answered with the old scores.

The new scores lie next to the entries in the slot that the old ones leave free. When every entry has them, the encoder
changes to the new network in one step. No entry is encoded again, and none is lost: KV is only read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields

from ragkv.errors import QueueError, StoreReadOnlyError
from ragkv.fusion import Scorer
from ragkv.runtime import Check, Rate, no_check, openmp
from ragkv.scheduling import Scheduler
from ragkv.store import Entry, Store

from .encoder import Encoder, StoredScores


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """What became of the stored chunks."""

    scored: int  # from the KV that is stored
    present: int  # had this network's scores already: an earlier run was interrupted
    unreadable: int  # damaged, or deleted meanwhile
    left: int = 0  # not reached, because a deadline or a cancellation ended the work

    @property
    def is_complete(self) -> bool:
        """Whether the encoder uses the new scores now."""
        return not self.left


class Rescorer:
    """Gives the stored chunks of one encoder the scores of another network."""

    def __init__(self, encoder: Encoder, store: Store, scheduler: Scheduler) -> None:
        self._encoder, self._store, self._scheduler = encoder, store, scheduler
        self._entries = StoredScores(encoder, store)

    def rescore(
        self,
        scorer: Scorer,
        chunks: Sequence[tuple[int, ...]] = (),
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
    ) -> RescoreReport:
        """Score every stored chunk with `scorer`, which the encoder then uses.

        `chunks` come first, in this order: those of a document are each other's neighbours. `on_progress(done, total)`
        is called after each batch, `check` before it; a `QueueError` from it ends the work, and the encoder keeps the
        old network. Raises `StoreReadOnlyError`.
        """
        if self._store.read_only:
            raise StoreReadOnlyError("The store is open for reading only, so nothing in it can be scored anew.")
        stored = {info.token_ids for info in self._store.infos() if info.identity == self._encoder.identity}
        first = [token_ids for token_ids in dict.fromkeys(chunks) if token_ids in stored]
        ordered = [*first, *sorted(stored.difference(first))]
        identity = with_fields(self._encoder.identity, scorer=scorer.name)
        lacking = [ids for ids in ordered if self._store.scores(identity, ids) is None]
        present, scored, unreadable, at, rate = len(ordered) - len(lacking), 0, 0, 0, Rate()
        rate.update(0, len(lacking))
        for batch in batches(lacking, self._encoder.batch_tokens):
            try:
                check()
            except QueueError:
                return RescoreReport(scored, present, unreadable, left=len(lacking) - at)
            at += len(batch)
            entries = [entry for token_ids in batch if (entry := self._entries.entry(token_ids)) is not None]
            unreadable += len(batch) - len(entries)
            for scores in self._scores(scorer, ordered, entries):
                self._store.put_scores(scores, durably=True)
                scored += 1
            if on_progress:
                on_progress(at, len(lacking))
        openmp.release_threads()
        self._encoder.use(scorer)
        return RescoreReport(scored, present, unreadable)

    def _scores(self, scorer: Scorer, chunks: Sequence[tuple[int, ...]], entries: Sequence[Entry]) -> list[Entry]:
        with self._scheduler.encoding_turn():
            scorer.register(chunks)
            return self._encoder.scores(entries, scorer)


def batches(chunks: Sequence[tuple[int, ...]], tokens: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """The chunks in order, as many together as have at most `tokens` tokens, but one at least."""
    start = 0
    while start < len(chunks):
        stop, taken = start + 1, len(chunks[start])
        while stop < len(chunks) and taken + len(chunks[stop]) <= tokens:
            taken, stop = taken + len(chunks[stop]), stop + 1
        yield chunks[start:stop]
        start = stop
