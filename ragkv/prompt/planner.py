"""From a prompt to a plan: looks up what is stored of its runs, and has them classified
(`classify.py`).

Leases are opened here and closed by the caller's exit stack.
"""

from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ragkv.model import Adapter
from ragkv.prompt.history import Block, BlockWriter
from ragkv.scheduling import Scheduler
from ragkv.scheduling.encoding import BackgroundEncoder, Encoder
from ragkv.store import EntryKey, HintedEntry, Identity, Lease, PrefetchHint, Store

from .classify import (
    FoundPrompt,
    FoundRun,
    Planned,
    RunWish,
    Wishes,
    classify,
    wishes,
)
from .request import ActiveRequest, PrefillMethod, Prompt

# A first passage of at most `MOST_IN_PLACE` tokens, as retrieval cuts them, is computed until its
# exact entry is there. Longer ones are fused: a document that was stored ahead shall not be
# computed when a question comes.
MOST_IN_PLACE = 512


class Planner:
    """Decides how every run of a prompt is served."""

    def __init__(
        self,
        adapter: Adapter,
        encoder: Encoder,
        store: Store,
        scheduler: Scheduler,
        block_writer: BlockWriter,
        background: BackgroundEncoder,
        unused_note: str | None = None,
    ) -> None:
        """`background` is given every chunk whose entry is missing.

        `unused_note` says why stored entries are not reused; the first report of a cache miss has
        it.
        """
        self.adapter = adapter
        self._encoder = encoder
        self._store = store
        self._scheduler = scheduler
        self._block_writer = block_writer
        self._background = background
        self._unreported = (unused_note,) if unused_note else ()

    def plan(self, active: ActiveRequest, leases: ExitStack) -> Planned:
        """The plan of a request's prompt, its leases opened on `leases`. A damaged entry counts as
        a cache miss.

        Acquires the compute lock if the prefix has to be encoded.
        """
        prompt = active.prompt
        method = active.request.method
        wished = wishes(prompt, method, self.adapter.rope.frequencies(len(prompt.token_ids)))
        if not active.damaged:  # else what waits is what this request missed itself
            wanted = (
                (ids, wish)
                for ids, wish in zip(prompt.stored_ids, wished.chunks, strict=True)
                if wish.is_wanted
            )
            firsts = (
                (self._encoder.preferred(is_exact=wish.is_exact)[0], ids) for ids, wish in wanted
            )
            self._background.finish(firsts, active.ticket.check)
        found = self._look_up(prompt, method, wished, active.damaged, leases)
        planned = classify(prompt, method, wished, found)
        fused = [
            run.lease
            for wish, run in zip(wished.chunks, found.chunks, strict=True)
            if not wish.is_exact
        ]
        if old := sum(
            lease is not None and lease.info.identity != self._encoder.identity for lease in fused
        ):
            note = (
                f"{old} chunks were fused from KV encoded alone; expected KV is made in the "
                "background"
            )
            planned = replace(planned, notes=(*planned.notes, note))
        if planned.missed:
            planned = replace(planned, notes=(*planned.notes, *self._unreported))
            self._unreported = ()
        return planned

    def prefetch_hint(self, active: ActiveRequest) -> PrefetchHint:
        """What `plan` will look up in the store, as far as it is known before: history in order,
        then chunks.
        """
        prompt = active.prompt
        method = active.request.method
        of_blocks = self._encoder.alone
        wished = wishes(prompt, method, self.adapter.rope.frequencies(len(prompt.token_ids)))

        def stored(ids: tuple[int, ...], wish: RunWish) -> Identity:
            """Of the entry that will be read, or of the one that is wanted if none is stored."""
            preferred = self._encoder.preferred(is_exact=wish.is_exact)
            return next(
                (one for one in preferred if self._store.contains(one.key(ids))), preferred[0]
            )

        def hint(identity: Identity, ids: tuple[int, ...], group: str) -> HintedEntry:
            return HintedEntry(identity, ids, self._encoder.entry_bytes(len(ids), identity), group)

        blocks = [
            hint(block.identity(of_blocks), block.token_ids, active.session_id)
            for block, wish in zip(prompt.history.blocks, wished.blocks, strict=True)
            if wish.is_wanted
        ]
        chunks = [
            hint(stored(ids, wish), ids, "")
            for ids, wish in zip(prompt.stored_ids, wished.chunks, strict=True)
            if wish.is_wanted
        ]
        return PrefetchHint((*blocks, *chunks))

    def _look_up(
        self,
        prompt: Prompt,
        method: PrefillMethod,
        wished: Wishes,
        damaged: Container[EntryKey],
        leases: ExitStack,
    ) -> FoundPrompt:
        """What is stored of the runs that are wanted; missing chunks are given to the background
        encoder.
        """

        def opened(key: EntryKey, find: Callable[[], Lease | None]) -> Lease | None:
            """The lease that `find` gives, opened on `leases`; `None` also for an entry known to be
            damaged.
            """
            lease = None if key in damaged else find()
            return None if lease is None else self._of_this_model(leases.enter_context(lease))

        def find_block(block: Block, wish: RunWish) -> FoundRun:
            if not wish.is_wanted:
                return FoundRun()
            writer = self._block_writer
            return FoundRun(opened(writer.key(block), lambda: writer.lease(block)))

        def find_chunk(ids: tuple[int, ...], wish: RunWish) -> FoundRun:
            if not wish.is_wanted:
                return FoundRun()
            preferred = self._encoder.preferred(is_exact=wish.is_exact)
            for identity in preferred:
                lease = opened(identity.key(ids), partial(self._store.lease, identity, ids))
                if lease is not None:
                    break
            is_best = lease is not None and lease.info.identity == preferred[0]
            if not is_best:
                # now, so that a deletion from here on cancels it
                self._background.add(ids, preferred[0])
            in_place = wish.is_exact and not is_best and len(ids) <= MOST_IN_PLACE
            return FoundRun(
                lease, any(identity.key(ids) in damaged for identity in preferred), in_place
            )

        prefix = None
        if method.reuse != "none" and prompt.own_prefix:
            prefix = self._encoder.prefix(len(prompt.token_ids), self._scheduler.turn)
        blocks = tuple(map(find_block, prompt.history.blocks, wished.blocks))
        chunks = tuple(map(find_chunk, prompt.stored_ids, wished.chunks))
        return FoundPrompt(prefix, blocks, chunks, tuple(self._store.away()))

    def _of_this_model(self, lease: Lease) -> Lease | None:
        """The lease; `None` if its KV has another model's shape: who can write to shared storage
        can forge it.
        """
        info = lease.info
        return (
            lease if (info.layers, info.kv_heads, info.head_dim) == self.adapter.kv_shape else None
        )
