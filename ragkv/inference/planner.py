"""From a prompt to a plan: the entries found for its runs, and what each run's fate is.

Leases are opened here and closed by the caller's exit stack. Which spans are exact is decided here and nowhere else.
"""

from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from ragkv.config import ReuseMode
from ragkv.encoding import Encoder
from ragkv.fusion import Plan, Span, SpanKind, SpanState
from ragkv.history import Block, BlockWriter, Chain
from ragkv.model import Adapter
from ragkv.scheduling import Activity
from ragkv.store import CODECS, HintedEntry, Lease, PrefetchHint, Store, ids_digest

from .request import Prompt


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what was not found for it."""

    plan: Plan
    missed: tuple[int, ...]  # indices of chunks without a usable entry, of those looked up
    unscored: tuple[int, ...]  # indices of chunks whose entry lacks the sensitivity it is to have
    remade: tuple[int, ...] = ()  # indices of blocks of history that this pass computes for good
    notes: tuple[str, ...] = ()  # why history is computed


class Planner:
    """Decides every span's fate."""

    def __init__(
        self, adapter: Adapter, encoder: Encoder, store: Store, activity: Activity, saver: BlockWriter
    ) -> None:
        self._adapter, self._encoder, self._store, self._activity = adapter, encoder, store, activity
        self._saver = saver

    def plan(
        self, prompt: Prompt, reuse: ReuseMode, keeps: bool, without: Container[str], leases: ExitStack
    ) -> Planned:
        """The plan of `prompt`, its leases opened on `leases`; entries whose key is in `without` are taken as misses.

        `keeps` says whether history that is not exact may be used. Takes its turn at the model if the prefix has to be
        encoded.
        """
        length, behind_prefix = len(prompt.token_ids), len(prompt.prefix)
        spans = [self._prefix(prompt, reuse, length)] if prompt.prefix else []
        at = behind_prefix + len(prompt.history)
        past = _PastPlan(self._saver, prompt, self._adapter.rope.frequencies(length), without, leases)
        spans += past.spans(reuse, keeps and reuse == "fused")
        missed, unscored = [], []
        frequencies = self._adapter.rope.frequencies(length)
        for index, token_ids in enumerate(prompt.chunks):
            exact = at == behind_prefix and prompt.own_prefix
            wanted = index not in prompt.plain and (reuse == "fused" or (reuse == "prefix" and exact))
            lease = self._lease(token_ids, without, leases) if wanted else None
            if wanted and lease is None:
                missed.append(index)
            elif lease is not None and lease.sensitivity is None and self._encoder.scorer is not None:
                unscored.append(index)
            if lease is None:
                state = SpanState.COMPUTED
            elif exact and lease.info.lossless and lease.info.frequencies == frequencies:
                state = SpanState.EXACT  # it saw just what precedes it here
            else:
                state = SpanState.FUSED if reuse == "fused" else SpanState.COMPUTED
            kept = None if state is SpanState.COMPUTED else lease
            spans.append(Span(SpanKind.CHUNK, at, at + len(token_ids), state, kept, index))
            at += len(token_ids)
        if prompt.question:
            spans.append(Span(SpanKind.QUESTION, at, length, SpanState.COMPUTED))
        plan = Plan.of(torch.tensor(prompt.token_ids), spans)
        return Planned(plan, tuple(missed), tuple(unscored), tuple(past.remade), past.notes)

    def weighted_by_question(self, planned: Planned, prompt: Prompt) -> Planned:
        """`planned` with scores as what is asked weighs them."""
        scorer = self._encoder.scorer
        return replace(planned, plan=scorer.weighted_by_question(planned.plan, prompt.asked_ids)) if scorer else planned

    def prefetch_hint(self, prompt: Prompt, reuse: ReuseMode, session_id: str = "") -> PrefetchHint:
        """What `plan` will look up in the store, as far as can be told before: history in order, then chunks."""
        if reuse == "none":
            return PrefetchHint()
        identity, frequencies = self._encoder.identity, self._adapter.rope.frequencies(len(prompt.token_ids))
        wanted = [
            HintedEntry(block.identity(identity), block.token_ids, self._bytes(block.token_ids), session_id)
            for block in prompt.history.blocks
            if block.frequencies == frequencies
        ]
        if reuse == "fused":
            stored = [ids for index, ids in enumerate(prompt.chunks) if index not in prompt.plain]
        else:  # exact alone: the chunk right behind the prefix
            stored = list(prompt.chunks[:1]) if not prompt.history and 0 not in prompt.plain else []
        return PrefetchHint((*wanted, *(HintedEntry(identity, ids, self._bytes(ids)) for ids in stored)))

    def _bytes(self, token_ids: Sequence[int]) -> int:
        """Bytes of an entry of these tokens, as it is stored."""
        adapter, codec = self._adapter, CODECS[self._encoder.identity.codec]
        shape = (2, adapter.kv_heads, len(token_ids), adapter.head_dim)
        return adapter.layer_count * codec.layout(shape, adapter.dtype).nbytes

    def _prefix(self, prompt: Prompt, reuse: ReuseMode, length: int) -> Span:
        wanted = reuse != "none" and prompt.own_prefix
        lease = self._encoder.prefix(length, self._activity.acquire_compute_lock) if wanted else None
        state = SpanState.COMPUTED if lease is None else SpanState.EXACT
        return Span(SpanKind.PREFIX, 0, len(prompt.prefix), state, lease)

    def _lease(self, token_ids: tuple[int, ...], without: Container[str], leases: ExitStack) -> Lease | None:
        if self._encoder.identity.key(token_ids) in without:
            return None
        lease = self._store.lease(self._encoder.identity, token_ids)
        return None if lease is None else leases.enter_context(lease)


class _PastPlan:
    """The fate of a prompt's history."""

    def __init__(
        self, saver: BlockWriter, prompt: Prompt, frequencies: str, without: Container[str], leases: ExitStack
    ) -> None:
        self._saver, self._prompt, self._frequencies = saver, prompt, frequencies
        self._without, self._leases = without, leases
        self._computed: dict[str, int] = {}  # tokens by the reason
        self.remade: list[int] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """Why what is computed is."""
        return tuple(f"{count} history tokens recomputed: {why}" for why, count in self._computed.items())

    def spans(self, reuse: ReuseMode, keeps: bool) -> list[Span]:
        """The history's spans, in order; `keeps` says whether what is not exact may be used."""
        prompt, spans, at = self._prompt, [], len(self._prompt.prefix)
        chain, behind = Chain(prompt.prefix), ids_digest(prompt.prefix)
        for index, block in enumerate(prompt.history.blocks):
            unmoved = block.start == 0 and block.rotated_from in (None, at)
            exact = unmoved and block.context == chain.context(self._frequencies)
            lease, why = (None, None) if reuse == "none" else self._found(block, behind, exact or keeps)
            if why is not None:
                self._computed[why] = self._computed.get(why, 0) + len(block)
                self.remade.append(index)
            state = SpanState.COMPUTED
            if lease is not None:
                state = SpanState.EXACT if exact and lease.info.lossless else SpanState.APPROXIMATE
            if state is SpanState.APPROXIMATE and not keeps:  # rounded by its codec
                lease, state = None, SpanState.COMPUTED
            stop = at + len(block)
            turned = block.rotated_from if lease is not None else None
            spans.append(
                Span(SpanKind.HISTORY, at, stop, state, lease, offset=block.start if lease else 0, rotated_from=turned)
            )
            chain.add(block.kept_ids)
            at = stop
        if prompt.history.tail:
            spans.append(Span(SpanKind.HISTORY, at, at + len(prompt.history.tail), SpanState.COMPUTED))
        return spans

    def _found(self, block: Block, behind: str, usable: bool) -> tuple[Lease | None, str | None]:
        """What `block` is read from, or why it is computed."""
        if block.prefix_digest != behind:
            return None, "it stood behind another prefix"
        if block.frequencies != self._frequencies:
            return None, "the RoPE frequencies changed"
        if not usable:
            return None, "it was not exact"
        lease = None if self._saver.key(block) in self._without else self._saver.lease(block)
        return (None, "its block was lost") if lease is None else (self._leases.enter_context(lease), None)
