"""Prefilling: one prompt's KV and last logits, and the report of how they came to be.

Plan -> load and fuse -> report. An entry that turns out bad while it is read becomes a miss of this request, and the
pass starts again without it: rows of a hole must have passed every earlier layer.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache

from ragkv.encoding import BackgroundEncoder
from ragkv.errors import EntryDamagedError
from ragkv.fusion import Fused, Fusor, Selector, SpanState, raised_ratio, usable
from ragkv.model import Adapter, Recording
from ragkv.model.kcache import OffloadedKV, Offloading
from ragkv.scheduling import Activity, DecodeBatch
from ragkv.types import PromptSpan, Reuse, Timing

from .load_control import LoadControl
from .planner import Planned, Planner
from .request import How, Prompt
from .spans import prompt_spans


@dataclass(frozen=True, slots=True)
class Made:
    """The KV that a turn of a conversation makes, by position; decoding goes on filling it."""

    record: Recording
    remade: tuple[int, ...]  # indices of the history's blocks that were computed for good
    exact_to: int  # what lies behind this position saw, or is, something not exact
    frequencies: str  # digest of the RoPE frequencies it was made under


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt, ready to decode."""

    token_ids: torch.Tensor  # (S,) int64, CPU
    selected_by_layer: tuple[torch.Tensor, ...]  # L tensors of chunk positions recomputed in that layer, int64, CPU
    logits: torch.Tensor  # (V,) float32, after any scaling or capping
    reuse: Reuse
    timing: Timing
    fused: Fused  # the live KV; `cache` copies it
    made: Made | None = None  # what a conversation may keep
    spans: tuple[PromptSpan, ...] = ()  # the prompt, run by run; they sum to `reuse`

    @property
    def selected(self) -> torch.Tensor:
        """Chunk positions recomputed in the last layer: without question, holes, prefix. int64, CPU."""
        return self.selected_by_layer[-1]

    @property
    def cache(self) -> DynamicCache:
        """A fresh transformers cache: full layers, S rotated positions each, on sliding layers too."""
        return self.fused.kv.to_dynamic_cache()


class Prefiller:
    """Makes prefills for one model. Holds no request's state."""

    def __init__(
        self,
        planner: Planner,
        fusor: Fusor,
        background: BackgroundEncoder,
        activity: Activity,
        batch: DecodeBatch,
        control: LoadControl,
        adapter: Adapter,
        offloading: Offloading,
    ) -> None:
        """`background` is given every chunk whose entry is missing or incomplete; `batch` may decode between layers."""
        self._planner, self._fusor, self._background = planner, fusor, background
        self._control = control
        self._activity, self._batch, self._adapter, self._offloading = activity, batch, adapter, offloading

    def prefill(
        self,
        prompt: Prompt,
        how: How,
        room: int,
        began: float,
        keep: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Prefill:
        """The prefill of `prompt`, with room for an answer of `room` tokens; times count from `began`.

        `keep` is of a conversation's turn: what it makes is recorded, from the first token that has no block. Its first
        layers are read while others still compute; the model is taken only then. `check` is called while it waits for
        the model and between layers; what it raises ends the prefill.
        """

        def between() -> None:
            check()
            self._batch.step_waiting()

        damaged: dict[str, str] = {}  # why, by key
        lookup_s = 0.0
        while True:
            with ExitStack() as held:
                looking = time.perf_counter()
                whole = how.ratio == 1.0 or how.selector.name == "all"  # these equal a full prefill, always
                keeps = how.keeps_history and not whole
                planned = self._planner.plan(prompt, how.reuse, keeps, damaged, held)
                for index in planned.missed + planned.unscored:  # now: a deletion from here on undoes it
                    self._background.add(prompt.chunks[index])
                selector, fallback = usable(how.selector, planned.plan.candidates, how.ratio)
                planned, asked, decision = self._controlled(planned, how, selector)
                if selector.needs_scores:
                    planned = self._planner.weighted_by_question(planned, prompt)
                ratio, guarded = self._guarded(asked, planned)
                fusing = held.enter_context(self._fusor.open(planned.plan, selector, ratio))
                record = self._recording(prompt, planned, room) if keep else None
                length = planned.plan.token_ids.numel()
                lookup_s += time.perf_counter() - looking
                try:
                    with self._activity.acquire_compute_lock(check):
                        waited = time.perf_counter() - began - lookup_s
                        fused = fusing.run(room, record, between, self._offloading.new_kv(length))
                    break
                except EntryDamagedError as error:
                    damaged[error.key] = str(error)
        timing = Timing(
            queue_s=waited,
            lookup_s=lookup_s,
            load_s=fused.load_s,
            fuse_s=fused.fuse_s,
            prefill_s=fused.prefill_s,
            first_token_s=time.perf_counter() - began,
        )
        extra = (fallback, guarded, self._offloading.refusal(length))
        notes = (*damaged.values(), *prompt.notes, *planned.notes, *asked.notes, *filter(None, extra))
        report = self._report(planned, fused, ratio, selector, notes, decision)
        made = None if record is None else self._made(record, planned, fused)
        spans = prompt_spans(planned.plan, fused.selected_by_layer[-1], prompt.plain, prompt.asked)
        ids = planned.plan.token_ids
        return Prefill(ids, fused.selected_by_layer, fused.logits, report, timing, fused, made, spans)

    def _recording(self, prompt: Prompt, planned: Planned, room: int) -> Recording | None:
        """A recording of what has no block; `None` where no longer prompt could use it (dynamic RoPE)."""
        length, blocks = planned.plan.token_ids.numel(), prompt.history.blocks
        rope = self._adapter.rope
        if rope.frequencies(length) != rope.frequencies(length + 1):
            return None
        reused = blocks[: min(planned.remade, default=len(blocks))]
        return self._adapter.new_recording(len(prompt.prefix) + sum(map(len, reused)), length + room)

    def _made(self, record: Recording, planned: Planned, fused: Fused) -> Made:
        left = any(len(planned.plan.candidates) > chosen.numel() for chosen in fused.selected_by_layer)
        inexact = {SpanState.APPROXIMATE, SpanState.FUSED} if left else {SpanState.APPROXIMATE}
        length = planned.plan.token_ids.numel()
        # an answer decoded over the top values alone is no full prefill's
        decoded = length if isinstance(fused.kv, OffloadedKV) else record.stop
        exact_to = min((span.start for span in planned.plan.spans if span.state in inexact), default=decoded)
        return Made(record, planned.remade, min(exact_to, decoded), self._adapter.rope.frequencies(length))

    def _controlled(self, planned: Planned, how: How, selector: Selector) -> tuple[Planned, How, tuple[str, ...]]:
        """Plan and ratio as the loading controller wants them, if it is asked, and why."""
        if not how.controlled:
            layers = self._adapter.layer_count
            spared = self._control.shed_loads(planned.plan, selector, how.ratio, self._fusor.row_layer_s, layers)
            notes = how.notes if spared.note is None else (*how.notes, spared.note)
            return replace(planned, plan=spared.plan), replace(how, notes=notes), ()
        found = self._control.decide(planned.plan, selector, how.ratio)
        notes = how.notes if found.note is None else (*how.notes, found.note)
        return replace(planned, plan=found.plan), replace(how, ratio=found.ratio, notes=notes), found.why

    def _guarded(self, how: How, planned: Planned) -> tuple[float, str | None]:
        """The ratio that leaves no more deviation than the gate allows, and what to say if it was raised."""
        if how.most_left is None or not how.selector.needs_scores:
            return how.ratio, None
        ratio = raised_ratio(planned.plan.candidates, how.ratio, how.most_left)
        note = f"guard: ratio raised from {how.ratio} to {ratio:.3f}, these chunks depend on context more than most"
        return ratio, note if ratio > how.ratio else None

    def _report(
        self,
        planned: Planned,
        fused: Fused,
        ratio: float,
        selector: Selector,
        notes: tuple[str, ...],
        decision: tuple[str, ...],
    ) -> Reuse:
        plan, length = planned.plan, planned.plan.token_ids.numel()
        forced, recomputed = plan.forced.numel(), fused.selected_by_layer[-1].numel()
        exact = sum(
            len(span) - (span.stop == length)  # the last token is computed
            for span in plan.spans
            if span.state is SpanState.EXACT
        )
        return Reuse(
            exact=exact,
            fused=length - exact - forced - recomputed,
            recomputed=recomputed,
            computed=forced,
            bytes_by_tier=fused.bytes_by_tier,
            missed_chunks=len(planned.missed),
            missed_tokens=sum(len(span) for span in plan.spans if span.chunk in planned.missed),
            ratio=ratio,
            selector=selector.name,
            compute=fused.row_layers / (self._adapter.layer_count * length),
            notes=notes,
            decision=decision,
        )
