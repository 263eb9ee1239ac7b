"""Prefilling: one prompt's KV and last logits (CacheBlend section 5.2).

Look up and plan, decide, fuse, report. An entry that turns out damaged while it is read becomes a
cache miss of this request. The pass then starts again, because the rows of a miss are computed from
layer 0 on.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from ragkv.control import Controller
from ragkv.errors import EntryDamagedError
from ragkv.fusion import Fusor, Passed, Plan, PromptPass, SpanKind, SpanState
from ragkv.model import Recording
from ragkv.scheduling import Scheduler
from ragkv.store import EntryKey
from ragkv.types import Timing

from .lookup import Lookup
from .prompt import Task
from .report import prompt_spans, reuse_report
from .request import Prefill, TurnKV

if TYPE_CHECKING:
    from ragkv.model.kcache import Offloading


@dataclass(eq=False)
class Prefiller:
    """Makes prefills for one model. Holds no request's state."""

    lookup: Lookup
    fusor: Fusor
    scheduler: Scheduler
    controller: Controller
    offloading: "Offloading | None"  # where KCache is on

    def prefill(self, task: Task) -> Prefill:
        """Prefill the request's prompt. Its first layers are read while others still compute.

        Raises what the task's work raises, while it waits for the model and between layers.
        """
        damaged: dict[EntryKey, str] = {}
        lookup_s = 0.0
        alone = False  # whether the prompt may not share its pass
        method = task.request.method
        keeps = method.reuse == "prefix"
        keep = self.lookup.prefix_blocks.keeper() if keeps else None
        while True:
            with ExitStack() as leases:
                began = time.perf_counter()
                again = alone or bool(damaged)
                found = self.lookup.plan(task, damaged, leases, again)
                plan = self.controller.decide(found, method)
                record = self._recording(task, plan)
                passing = leases.enter_context(self._prepared(task, plan, record))
                lookup_s += time.perf_counter() - began
                rows = inf if alone else passing.rows
                self.scheduler.prefills.run(passing, rows, task.work, self._compute)
                try:
                    passed = passing.result()
                except EntryDamagedError as error:
                    damaged[error.key] = str(error)
                    continue
            if passed is not None:
                break
            alone = True  # a pass with other prompts failed
        self.fusor.learn(passed)
        self.controller.learn(plan, method.selector, passed)
        if keep is not None and record is not None:
            keep(
                task.prompt, self.fusor.adapter.rope.frequencies(len(task.prompt.token_ids)), record
            )
        return self._prefilled(task, plan, passed, record, lookup_s, tuple(damaged.values()))

    def _prepared(
        self, task: Task, plan: Plan, record: Recording | None
    ) -> AbstractContextManager[PromptPass]:
        length = plan.token_ids.numel()
        return self.fusor.prepared(
            plan,
            task.request.method.selector,
            plan.ratio,
            headroom=task.request.max_new_tokens,
            record=record,
            check=task.work.check,
            new_kv=None if self.offloading is None else self.offloading.new_kv(length),
        )

    def _compute(self, prompts: Sequence[PromptPass]) -> None:
        """One pass over prompts, of this engine or of others on the model."""
        self.fusor.run(prompts, self.scheduler.between_layers)

    def _prefilled(
        self,
        task: Task,
        plan: Plan,
        passed: Passed,
        record: Recording | None,
        lookup_s: float,
        damaged: tuple[str, ...],
    ) -> Prefill:
        fused = passed.fused
        length = plan.token_ids.numel()
        refused = self.offloading.refusal(length) if self.offloading else None
        elapsed_s = task.elapsed_s()
        reuse = reuse_report(
            plan, task.request.method.selector, passed, self.fusor.adapter.layer_count
        )
        notes = (*damaged, *task.prompt.notes, *reuse.notes, *filter(None, [refused]))
        return Prefill(
            token_ids=plan.token_ids,
            selected_by_layer=passed.selected_by_layer,
            logits=passed.logits,
            reuse=replace(reuse, notes=notes),
            timing=Timing(
                queue_s=elapsed_s - lookup_s - passed.pass_s + passed.others_s,
                lookup_s=lookup_s,
                load_s=passed.load_s,
                fuse_s=fused.place_s,
                prefill_s=passed.pass_s - passed.others_s,
                first_token_s=elapsed_s,
            ),
            kv=fused.kv,
            turn_kv=self._turn_kv(task, plan, passed, record),
            spans=prompt_spans(plan, passed.selected_by_layer[-1], task.prompt.question_end),
        )

    def _recording(self, task: Task, plan: Plan) -> Recording | None:
        """A recording of all tokens that have no block, if their KV is kept.

        `None` also where no longer prompt could use it (dynamic RoPE).
        """
        prompt = task.prompt
        rope = self.fusor.adapter.rope
        length = plan.token_ids.numel()
        keeps = task.keep or task.request.method.reuse == "prefix"
        if not keeps or rope.frequencies(length) != rope.frequencies(length + 1):
            return None
        blocks = prompt.blocks
        reused = blocks[: min(plan.recomputed_blocks, default=len(blocks))]
        start = len(prompt.prefix) + sum(map(len, reused))
        return self.fusor.adapter.new_recording(start, length + task.request.max_new_tokens)

    def _turn_kv(
        self, task: Task, plan: Plan, passed: Passed, record: Recording | None
    ) -> TurnKV | None:
        """The KV that a conversation may store, with the position up to which it is exact."""
        if record is None or not task.keep:
            return None
        length = plan.token_ids.numel()
        selected = passed.selected_by_layer
        stale = any(len(plan.candidates) > chosen.numel() for chosen in selected)
        inexact = {SpanState.APPROXIMATE, SpanState.FUSED} if stale else {SpanState.APPROXIMATE}
        # An answer decoded over the largest attention weights only differs from a full prefill.
        offloads = self.offloading is not None and not self.offloading.refusal(length)
        end = length if offloads else record.stop
        exact_until = min((span.start for span in plan.spans if span.state in inexact), default=end)
        chunks = (span for span in plan.spans if span.kind is SpanKind.CHUNK)
        return TurnKV(
            record,
            plan.recomputed_blocks,
            min(exact_until, end),
            self.fusor.adapter.rope.frequencies(length),
            stale and any(span.state is SpanState.FUSED for span in chunks),
        )
