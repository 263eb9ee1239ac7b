"""Prefilling: one prompt's KV and last logits, and the report of how they were made.

Plan, load and fuse, report. An entry that turns out damaged while it is read becomes a cache miss
of this request, and the pass starts again without it: the rows of a cache miss must have passed
every earlier layer.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

import torch

from ragkv.errors import EntryDamagedError
from ragkv.fusion import (
    Fused,
    Fusing,
    Fusor,
    Plan,
    Selector,
    Span,
    SpanKind,
    SpanState,
    budget,
    with_floor,
)
from ragkv.model import Recording
from ragkv.scheduling import Scheduler
from ragkv.types import PromptSpan, Reuse, Timing

from .classify import Planned
from .load_control import LoadControl
from .planner import Planner
from .request import ActiveRequest, Prefill, Prompt, TurnKV

if TYPE_CHECKING:
    from ragkv.model.kcache import Offloading

SLOWER = "computing is quicker than loading the stored KV"


@dataclass(frozen=True, slots=True)
class _Decided:
    """What one pass over a prompt is to do."""

    planned: Planned
    selector: Selector
    ratio: float
    notes: tuple[str, ...]
    decision: tuple[str, ...]  # why the loading controller chose this; empty if it was not asked


class Prefiller:
    """Makes prefills for one model. Holds no request's state."""

    def __init__(
        self,
        planner: Planner,
        fusor: Fusor,
        scheduler: Scheduler,
        load_control: LoadControl,
        offloading: "Offloading | None",
    ) -> None:
        """Between two layers the scheduler may decode a step for others. `offloading` is given
        where KCache is on.
        """
        self.adapter = planner.adapter
        self.scheduler = scheduler
        self._planner = planner
        self._fusor = fusor
        self._load_control = load_control
        self._offloading = offloading

    def prefill(self, active: ActiveRequest) -> Prefill:
        """Prefill the request's prompt. Its first layers are read while others still compute.

        Raises what the request's ticket raises, while it waits for the compute lock and between
        layers.
        """
        fused: Fused | None = None
        alone = False
        while fused is None:
            with ExitStack() as leases:
                looked_up = time.perf_counter()
                todo = self._decide(active, leases)
                plan = todo.planned.plan
                selector = todo.selector
                headroom = active.request.max_new_tokens
                record = self._recording(active, todo.planned) if active.keep else None
                new_kv = (
                    None
                    if self._offloading is None
                    else self._offloading.new_kv(len(plan.token_ids))
                )
                check = active.ticket.check
                fusing = Fusing(
                    self._fusor, plan, selector, todo.ratio, headroom, record, check, new_kv
                )
                leases.enter_context(fusing)
                active.lookup_s += time.perf_counter() - looked_up
                compute = partial(self._fusor.fuse, between=self.scheduler.between_layers)
                self.scheduler.prefills.run(fusing, inf if alone else fusing.rows, check, compute)
                try:
                    fused = fusing.result()
                except EntryDamagedError as error:
                    active.damaged[error.key] = str(error)
                else:
                    alone = fused is None  # a pass with other prompts failed
        active.queue_s = active.elapsed_s() - active.lookup_s - fused.prefill_s
        self._load_control.learn(plan, selector, todo.ratio, fused)
        active.prefill = prefill = self._prefilled(active, todo, fused, record)
        return prefill

    def _decide(self, active: ActiveRequest, leases: ExitStack) -> _Decided:
        """Plan the prompt; then selector, ratio and loads, as the controller wants them."""
        method = active.request.method
        planned = self._planner.plan(active, leases)
        selector = method.selector
        loads = self._load_control.decide(
            planned.plan, selector, method.ratio, controlled=method.controlled
        )
        plan = loads.plan
        ratio, floor = _floored(selector, len(plan.candidates), loads.ratio, method.floor_tokens)
        notes = (*planned.notes, *method.notes, *filter(None, (floor,)))
        return _Decided(replace(planned, plan=plan), selector, ratio, notes, loads.why)

    def _prefilled(
        self, active: ActiveRequest, todo: _Decided, fused: Fused, record: Recording | None
    ) -> Prefill:
        plan = todo.planned.plan
        prompt = active.prompt
        timing = Timing(
            queue_s=active.queue_s + fused.others_s,
            lookup_s=active.lookup_s,
            load_s=fused.load_s,
            fuse_s=fused.fuse_s,
            prefill_s=fused.prefill_s - fused.others_s,
            first_token_s=active.elapsed_s(),
        )
        return Prefill(
            token_ids=plan.token_ids,
            selected_by_layer=fused.selected_by_layer,
            logits=fused.logits,
            reuse=self._report(active, todo, fused),
            timing=timing,
            fused=fused,
            turn_kv=None if record is None else self._turn_kv(active, record, todo.planned, fused),
            spans=prompt_spans(plan, fused.selected_by_layer[-1], prompt, todo.planned.unused),
        )

    def _recording(self, active: ActiveRequest, planned: Planned) -> Recording | None:
        """A recording of all tokens that have no block; `None` where no longer prompt could use it
        (dynamic RoPE).
        """
        prompt = active.prompt
        rope = self.adapter.rope
        length = len(planned.plan.token_ids)
        if rope.frequencies(length) != rope.frequencies(length + 1):
            return None
        blocks = prompt.history.blocks
        reused = blocks[: min(planned.recomputed_blocks, default=len(blocks))]
        start = len(prompt.prefix) + sum(map(len, reused))
        return self.adapter.new_recording(start, length + active.request.max_new_tokens)

    def _turn_kv(
        self, active: ActiveRequest, record: Recording, planned: Planned, fused: Fused
    ) -> TurnKV:
        plan = planned.plan
        length = len(planned.plan.token_ids)
        stale = any(len(plan.candidates) > chosen.numel() for chosen in fused.selected_by_layer)
        inexact = {SpanState.APPROXIMATE, SpanState.FUSED} if stale else {SpanState.APPROXIMATE}
        # An answer decoded over the largest attention weights alone is not what a full prefill
        # computes.
        end = (
            record.stop if self._offloading is None or self._offloading.refusal(length) else length
        )
        exact_until = min((span.start for span in plan.spans if span.state in inexact), default=end)
        exact_until = min(exact_until, end)
        frequencies = self.adapter.rope.frequencies(length)
        chunks = (span for span in plan.spans if span.kind is SpanKind.CHUNK)
        leaves_stale = stale and any(span.state is SpanState.FUSED for span in chunks)
        return TurnKV(record, planned.recomputed_blocks, exact_until, frequencies, leaves_stale)

    def _report(self, active: ActiveRequest, todo: _Decided, fused: Fused) -> Reuse:
        plan = todo.planned.plan
        missed = todo.planned.missed
        length = len(plan.token_ids)
        forced = plan.forced.numel()
        recomputed = fused.selected_by_layer[-1].numel()
        exact = sum(
            len(span) - (span.stop == length)  # the last token is always computed
            for span in plan.spans
            if span.state is SpanState.EXACT
        )
        repaired = _history_note(plan, fused) if todo.ratio else None
        refused = self._offloading.refusal(length) if self._offloading else None
        joined = (
            f"computed in one pass with {fused.prompts - 1} other prompts"
            if fused.prompts > 1
            else None
        )
        notes = (*todo.notes, repaired, refused, joined)
        return Reuse(
            exact=exact,
            fused=length - exact - forced - recomputed,
            recomputed=recomputed,
            computed=forced,
            bytes_by_tier=fused.bytes_by_tier,
            missed_chunks=len(missed),
            missed_tokens=sum(len(span) for span in plan.spans if span.chunk in missed),
            ratio=todo.ratio,
            selector=todo.selector.name,
            compute=fused.row_layers / (self.adapter.layer_count * length),
            notes=(*active.damaged.values(), *active.prompt.notes, *filter(None, notes)),
            decision=todo.decision,
        )


def _history_note(plan: Plan, fused: Fused) -> str | None:
    """How much of the history was among the candidates, and how much of it was recomputed."""
    spans = [
        span
        for span in plan.spans
        if span.kind is SpanKind.HISTORY and span.state is SpanState.FUSED
    ]
    if not spans:
        return None
    selected = fused.selected_by_layer[-1]
    count = sum(int(((selected >= span.start) & (selected < span.stop)).sum()) for span in spans)
    return (
        f"{count} of {sum(map(len, spans))} history tokens that are not exact were recomputed "
        "for this question"
    )


def _floored(
    selector: Selector, count: int, ratio: float, floor_tokens: int
) -> tuple[float, str | None]:
    """The ratio by which at least `floor_tokens` of `count` candidates are recomputed, and a note
    if it is higher.
    """
    raised = with_floor(ratio, count, floor_tokens) if selector.uses_ratio else ratio
    if raised == ratio:
        return ratio, None
    return raised, (
        f"floor: {budget(raised, count)} of {count} fused tokens were recomputed; ratio "
        f"{ratio:.3g} would be "
        f"{budget(ratio, count)} (fusion.floor_tokens)"
    )


def prompt_spans(
    plan: Plan, selected: torch.Tensor, prompt: Prompt, unused: Mapping[int, str]
) -> tuple[PromptSpan, ...]:
    """The runs of a prompt, in order. They cover it, and their sums are those of `Reuse`.

    `selected` (C,) are the positions recomputed in the last layer, ascending. `unused` says why
    chunks were not looked up or not found, by their index; the other computed chunks were found,
    and left to be computed.
    """
    length = plan.token_ids.numel()
    positions = selected.tolist()
    spans = (span for span in plan.spans if len(span))
    pieces = (_pieces(span, length, positions, prompt.question_tokens, unused) for span in spans)
    return tuple(chain.from_iterable(pieces))


def _pieces(
    span: Span,
    length: int,
    selected: Sequence[int],
    question_tokens: int,
    unused: Mapping[int, str],
) -> Iterator[PromptSpan]:
    """Cut a span into pieces of one kind and one state. The last token of a prompt is always
    computed.
    """
    why = (
        unused.get(span.chunk, SLOWER)
        if span.chunk is not None and span.state is SpanState.COMPUTED
        else None
    )
    if span.kind is SpanKind.QUESTION:
        cut = min(span.start + question_tokens, span.stop)
        kinds = [("question", span.start, cut), ("template", cut, span.stop)]
    else:
        kinds = [(span.kind.value, span.start, span.stop)]
    for kind, start, stop in kinds:
        reused = stop if span.state is SpanState.COMPUTED else min(stop, length - 1)
        if start < reused:
            among = slice(bisect_left(selected, start), bisect_left(selected, reused))
            here = (
                tuple(at - start for at in selected[among]) if kind in ("chunk", "history") else ()
            )
            state = "fused" if span.state is SpanState.APPROXIMATE else span.state.value
            yield PromptSpan(kind, start, reused - start, state, here, span.chunk, why)
        if reused < stop and start < stop:
            yield PromptSpan(
                kind, max(start, reused), stop - max(start, reused), "computed", (), span.chunk
            )
