"""Prefilling: one prompt's KV and last logits, and the report of how they came to be.

Plan -> load and fuse -> report. An entry that turns out bad while it is read becomes a miss of this request, and the
pass starts again without it: rows of a hole must have passed every earlier layer.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from .batch import Batch
from .encoding import Activity, BackgroundEncoder
from .errors import EntryDamagedError
from .fusion import Fused, Fusor, Selector, SpanState, raised, usable
from .intake import How, Prompt
from .prompt import Planned, Planner
from .types import Reuse, Timing


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt, ready to decode."""

    token_ids: torch.Tensor  # (S,) int64, CPU
    selected_by_layer: tuple[torch.Tensor, ...]  # L tensors of chunk positions recomputed in that layer, int64, CPU
    logits: torch.Tensor  # (V,) float32, after any scaling or capping
    reuse: Reuse
    timing: Timing
    fused: Fused  # the live KV; `cache` copies it

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
        batch: Batch,
        layers: int,
    ) -> None:
        """`background` is given every chunk whose entry is missing or incomplete; `batch` may decode between layers."""
        self._planner, self._fusor, self._background = planner, fusor, background
        self._activity, self._batch, self._layers = activity, batch, layers

    def prefill(self, prompt: Prompt, how: How, room: int, began: float) -> Prefill:
        """The prefill of `prompt`, with room for an answer of `room` tokens; times count from `began`.

        Its first layers are read while others still compute; the model is taken only then.
        """
        damaged: dict[str, str] = {}  # why, by key
        lookup_s = 0.0
        while True:
            with ExitStack() as held:
                looking = time.perf_counter()
                planned = self._planner.plan(prompt, how.reuse, damaged, held)
                for index in planned.missed + planned.unscored:  # now: a deletion from here on undoes it
                    self._background.add(prompt.chunks[index])
                selector, fallback = usable(how.selector, planned.plan.candidates, how.ratio)
                ratio, guarded = self._guarded(how, planned)
                fusing = held.enter_context(self._fusor.open(planned.plan, selector, ratio))
                lookup_s += time.perf_counter() - looking
                try:
                    with self._activity.turn():
                        waited = time.perf_counter() - began - lookup_s
                        fused = fusing.run(room, between=self._batch.step_waiting)
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
        notes = (*damaged.values(), *how.notes, *filter(None, (fallback, guarded)))
        report = self._report(planned, fused, ratio, selector, notes)
        return Prefill(planned.plan.token_ids, fused.selected_by_layer, fused.logits, report, timing, fused)

    def _guarded(self, how: How, planned: Planned) -> tuple[float, str | None]:
        """The ratio that leaves no more deviation than the gate allows, and what to say if it was raised."""
        if how.most_left is None or not how.selector.needs_scores:
            return how.ratio, None
        ratio = raised(planned.plan.candidates, how.ratio, how.most_left)
        note = f"guard: ratio raised from {how.ratio} to {ratio:.3f}, these chunks depend on context more than most"
        return ratio, note if ratio > how.ratio else None

    def _report(
        self, planned: Planned, fused: Fused, ratio: float, selector: Selector, notes: tuple[str, ...]
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
            compute=fused.row_layers / (self._layers * length),
            notes=notes,
        )
