"""From a prompt to a plan: which stored entries serve it, and whether each run is exact, fused or computed.

Leases are opened here and closed by the caller's exit stack. Which spans are exact is decided here and nowhere else.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from ragkv.config import ReuseMode
from ragkv.fusion import Plan, Scorer, Span, SpanKind, SpanState
from ragkv.model import Adapter
from ragkv.prompt.history import Block, BlockWriter, exact_blocks
from ragkv.scheduling import Scheduler
from ragkv.scheduling.encoding import BackgroundEncoder, Encoder, StoredScores
from ragkv.store import CODECS, EntryKey, HintedEntry, Identity, Lease, PrefetchHint, Store, ids_digest

from .request import ActiveRequest, Prompt


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what the store could not give for it."""

    plan: Plan
    missed: tuple[int, ...]  # indices of chunks that were looked up and have no usable entry
    unused: Mapping[int, str] = field(default_factory=dict)  # why KV is not reused, by the index of the chunk
    recomputed_blocks: tuple[int, ...] = ()  # indices of history blocks that this pass computes, to be stored again
    notes: tuple[str, ...] = ()  # what became of inexact history, and which storage does not answer
    scorer: str = ""  # that made the scores of the plan's spans


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
        """`background` is given every chunk whose entry is missing or lacks scores.

        `unused_note` says why stored entries are not reused; the first report of a cache miss has it.
        """
        self.adapter, self._encoder, self._store, self._scheduler = adapter, encoder, store, scheduler
        self._scores = StoredScores(encoder, store)
        self._block_writer, self._background = block_writer, background
        self._unreported = (unused_note,) if unused_note else ()

    def plan(self, active: ActiveRequest, leases: ExitStack) -> Planned:
        """The plan of a request's prompt, its leases opened on `leases`. A damaged entry counts as a cache miss.

        Acquires the compute lock if the prefix has to be encoded.
        """
        prompt, method, damaged = active.prompt, active.request.method, active.damaged
        reuse, length = method.reuse, len(prompt.token_ids)
        if reuse == "fused" and method.selector.needs_scores:
            self._encoder.make_scores()
        frequencies = self.adapter.rope.frequencies(length)
        scorer = self._encoder.scorer if self._encoder.makes_scores else None
        history = _HistoryPlan(self.adapter, self._block_writer, scorer, prompt, damaged, leases)
        spans = [self._prefix(prompt, reuse, length)] if prompt.prefix else []
        inexact = method.inexact_history if reuse == "fused" and not method.is_full else "recompute"
        spans += history.spans(reuse, inexact, by_scores=method.selector.needs_scores)
        behind_prefix = len(prompt.prefix)
        at, missed, unused = behind_prefix + len(prompt.history), [], dict[int, str]()
        for index, token_ids in enumerate(prompt.chunks):
            # A chunk right behind the application's prefix was encoded behind exactly what precedes it here.
            exact = at == behind_prefix and prompt.own_prefix
            wanted = index not in prompt.plain and (reuse == "fused" or (reuse == "prefix" and exact))
            lease = self._lease(self._encoder.identity, token_ids, damaged, leases) if wanted else None
            if wanted and lease is None:
                missed.append(index)
            scores = None if lease is None else self._scores.find(token_ids)
            if wanted and (lease is None or (scores is None and self._encoder.makes_scores)):
                self._background.add(token_ids)  # now, so that a deletion from here on cancels it
            state = SpanState.COMPUTED
            if lease is not None and exact and lease.info.lossless and lease.info.frequencies == frequencies:
                state = SpanState.EXACT
            elif lease is not None and reuse == "fused":
                state = SpanState.FUSED
            if state is SpanState.COMPUTED and index not in prompt.plain:
                is_damaged = self._encoder.identity.key(token_ids) in damaged
                unused[index] = _why_unused(reuse, exact, lease is not None, is_damaged)
            used = None if state is SpanState.COMPUTED else lease
            spans.append(Span(SpanKind.CHUNK, at, at + len(token_ids), state, used, index, scores=scores))
            at += len(token_ids)
        if prompt.question:
            spans.append(Span(SpanKind.QUESTION, at, length, SpanState.COMPUTED))
        plan = Plan.of(torch.tensor(prompt.token_ids), spans)
        notes = history.notes if reuse == "none" else (*history.notes, *self._away(len(missed)))
        if missed:
            notes, self._unreported = (*notes, *self._unreported), ()
        name = "" if scorer is None or scorer is not self._encoder.scorer else scorer.name
        return Planned(plan, tuple(missed), unused, tuple(history.recomputed), notes, name)

    def weighted_by_question(self, plan: Plan, prompt: Prompt) -> Plan:
        """`plan` with its candidates' scores weighted by what the prompt asks."""
        scorer = self._encoder.scorer
        return plan if scorer is None else scorer.weighted_by_question(plan, prompt.dialogue_ids)

    def prefetch_hint(self, active: ActiveRequest) -> PrefetchHint:
        """What `plan` will look up in the store, as far as it is known before: history in order, then chunks."""
        prompt, reuse = active.prompt, active.request.method.reuse
        if reuse == "none":
            return PrefetchHint()
        identity, frequencies = self._encoder.identity, self.adapter.rope.frequencies(len(prompt.token_ids))
        slot = self._encoder.scores_slot
        scored = slot if active.request.method.inexact_history == "select" and reuse == "fused" else ""
        blocks = [
            HintedEntry(
                block.identity(identity),
                block.token_ids,
                self._bytes(block.token_ids),
                active.session_id,
                scored if block.fused else "",
            )
            for block in prompt.history.blocks
            if block.frequencies == frequencies
        ]
        chunks = [ids for index, ids in enumerate(prompt.chunks) if index not in prompt.plain]
        if reuse == "prefix":  # only the chunk right behind the prefix can be exact
            chunks = list(prompt.chunks[:1]) if not prompt.history and 0 not in prompt.plain else []
        hinted = [HintedEntry(identity, ids, self._bytes(ids), scores_slot=slot) for ids in chunks]
        return PrefetchHint((*blocks, *hinted))

    def _away(self, missed: int) -> Iterator[str]:
        """What the report says about storage that does not answer."""
        for kind in self._store.away():
            what = f"{missed} chunks that are not stored here were computed" if missed else "no chunk was missing here"
            yield f"{kind} does not answer: {what}"

    def _bytes(self, token_ids: Sequence[int]) -> int:
        """Stored bytes of an entry of these tokens."""
        adapter, codec = self.adapter, CODECS[self._encoder.identity.codec]
        shape = (2, adapter.kv_heads, len(token_ids), adapter.head_dim)
        return adapter.layer_count * codec.layout(shape, adapter.dtype).nbytes

    def _prefix(self, prompt: Prompt, reuse: ReuseMode, length: int) -> Span:
        wanted = reuse != "none" and prompt.own_prefix
        lease = self._encoder.prefix(length, self._scheduler.turn) if wanted else None
        state = SpanState.COMPUTED if lease is None else SpanState.EXACT
        return Span(SpanKind.PREFIX, 0, len(prompt.prefix), state, lease)

    def _lease(
        self, identity: Identity, token_ids: tuple[int, ...], damaged: Container[EntryKey], leases: ExitStack
    ) -> Lease | None:
        if identity.key(token_ids) in damaged:
            return None
        lease = self._store.lease(identity, token_ids)
        return None if lease is None else _of_model(leases.enter_context(lease), self.adapter)


def _of_model(lease: Lease, adapter: Adapter) -> Lease | None:
    """The lease; `None` if its KV has another model's shape: anyone who can write to shared storage can forge it."""
    info = lease.info
    return lease if (info.layers, info.kv_heads, info.head_dim) == adapter.kv_shape else None


def _why_unused(reuse: ReuseMode, may_be_exact: bool, stored: bool, damaged: bool) -> str:
    """Why a chunk's KV is computed. `may_be_exact`: the chunk stands where its stored KV could be exact."""
    if reuse == "none":
        return "the request asks for a full recompute"
    if reuse == "prefix" and not may_be_exact:
        return "the request asks for exact reuse, which only a passage right behind the prefix can have"
    if damaged:
        return "the stored KV is damaged, and is made again for the next request"
    if not stored:
        return "no usable KV was stored; it is stored for the next request"
    return "the stored KV is not exact here: it is compressed, or made under other RoPE frequencies"


class _HistoryPlan:
    """How the blocks of a prompt's history are served."""

    def __init__(
        self,
        adapter: Adapter,
        block_writer: BlockWriter,
        scorer: Scorer | None,
        prompt: Prompt,
        damaged: Container[EntryKey],
        leases: ExitStack,
    ) -> None:
        """`scorer` made the scores in use, if any are made."""
        self._adapter, self._block_writer, self._scorer, self._prompt = adapter, block_writer, scorer, prompt
        self._frequencies = adapter.rope.frequencies(len(prompt.token_ids))
        self._damaged, self._leases = damaged, leases
        self._computed: dict[str, int] = {}  # tokens by the reason why they are computed
        self._unscored = 0  # inexact tokens that would be candidates if they had scores
        self.recomputed: list[int] = []  # indices of blocks

    @property
    def notes(self) -> tuple[str, ...]:
        """Why history is computed, and why inexact history is not among the candidates."""
        computed = [f"{count} history tokens recomputed: {why}" for why, count in self._computed.items()]
        if self._unscored:
            what = f"{self._unscored} history tokens are not exact and were used as they are: they have no scores"
            computed.append(what)
        return tuple(computed)

    def spans(self, reuse: ReuseMode, inexact: str, *, by_scores: bool) -> list[Span]:
        """The history's spans, in order. `inexact` says what blocks that are not exact are used for.

        "select" makes those of turns that fused chunks candidates; `by_scores`: only those that have scores.
        "recompute" uses none.
        """
        prompt, spans, at = self._prompt, [], len(self._prompt.prefix)
        approximate = inexact != "recompute"
        blocks, prefix_digest = prompt.history.blocks, ids_digest(prompt.prefix)
        found = exact_blocks(prompt.prefix, blocks, self._frequencies)
        for index, (block, exact) in enumerate(zip(blocks, found, strict=True)):
            lease, why = (None, None) if reuse == "none" else self._find(block, prefix_digest, exact or approximate)
            if why is not None:
                self._computed[why] = self._computed.get(why, 0) + len(block)
                self.recomputed.append(index)
            state, scores = SpanState.COMPUTED, None
            if lease is not None and exact and lease.info.lossless:
                state = SpanState.EXACT
            elif lease is not None and approximate:
                state, scores = self._inexact(block, inexact, by_scores)
            if state is SpanState.COMPUTED:
                lease = None
            stop = at + len(block)
            offset, rotated_from = (block.start, block.rotated_from) if lease is not None else (0, None)
            spans.append(
                Span(SpanKind.HISTORY, at, stop, state, lease, None, offset, rotated_from=rotated_from, scores=scores)
            )
            at = stop
        if prompt.history.tail:
            spans.append(Span(SpanKind.HISTORY, at, at + len(prompt.history.tail), SpanState.COMPUTED))
        return spans

    def _inexact(self, block: Block, inexact: str, by_scores: bool) -> tuple[SpanState, torch.Tensor | None]:
        """How a block that is not exact is used, and its scores.

        Only a turn that fused chunks leaves tokens to choose from. Truncation, a codec that rounds, an answer decoded
        with KCache and what saw any of these are used as they are.
        """
        if inexact == "select" and block.fused and block.rotated_from is None:
            scores = self._scores(block) if by_scores else None
            if scores is not None or not by_scores:
                return SpanState.FUSED, scores
            self._unscored += len(block)
        return SpanState.APPROXIMATE, None

    def _scores(self, block: Block) -> torch.Tensor | None:
        """The scores (T, 1 + C) of a block's tokens; `None` if it has none of the scorer in use."""
        if self._scorer is None:
            return None
        scores = self._block_writer.scores(block, self._scorer.name)
        fits = scores is not None and scores.shape == (len(block.token_ids), self._scorer.columns)
        return scores if fits else None

    def _find(self, block: Block, prefix_digest: str, usable: bool) -> tuple[Lease | None, str | None]:
        """A lease on `block`, or why it is computed."""
        if block.prefix_digest != prefix_digest:
            return None, "it stood behind another prefix"
        if block.frequencies != self._frequencies:
            return None, "the RoPE frequencies changed"
        if not usable:
            return None, "it was not exact"
        lease = None if self._block_writer.key(block) in self._damaged else self._block_writer.lease(block)
        lease = None if lease is None else _of_model(self._leases.enter_context(lease), self._adapter)
        return lease, "its block was lost" if lease is None else None


__all__ = ["Planned", "Planner"]
