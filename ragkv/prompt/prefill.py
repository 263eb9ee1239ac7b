"""Prefill: computes one prompt's KV and last logits (CacheBlend section 5.2).

The steps are look-up and plan, decision, fusing, report. If an entry proves to be damaged while it
is read, it becomes a cache miss of this request. The pass then starts again, because the rows of a
miss are computed from layer 0 on.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from ragkv.control import Controller
from ragkv.errors import EntryDamagedError
from ragkv.fusion import Fusor, JointPassFailed, PassResult, Plan, SpanKind, SpanState
from ragkv.model import Recording
from ragkv.scheduling import Scheduler
from ragkv.store.entry import EntryKey
from ragkv.types import Reuse, Timing

from .lookup import Lookup
from .prefix_blocks import Keep
from .prompt import Task
from .report import prompt_spans, reuse_report
from .request import PrefilledPrompt, TurnKV

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

    def prefill(self, task: Task) -> PrefilledPrompt:
        """Prefill the request's prompt. Its first layers are read while others still compute.

        Raises what the task's claim raises, while it waits for the model and between layers.
        """
        # made now: it keeps no block of this prompt if anything is deleted from here on
        keep = None
        if task.request.method.reuse == "prefix":
            keep = self.lookup.prefix_blocks.keeper()
        damaged: dict[EntryKey, str] = {}  # each is a cache miss from now on
        alone = False
        while True:
            try:
                return self._attempt(task, damaged, alone, keep)
            except EntryDamagedError as error:
                if error.key in damaged:
                    raise  # The entry was a miss this time, so trying again would never end.
                damaged[error.key] = str(error)
            except JointPassFailed:
                alone = True

    def _attempt(
        self, task: Task, damaged: Mapping[EntryKey, str], alone: bool, keep: Keep | None
    ) -> PrefilledPrompt:
        """Plan the prompt, and pass it through the layers, `alone` or with other prompts. The
        entries in `damaged` are cache misses.

        Raises `EntryDamagedError` and `JointPassFailed`: the prompt is to be tried again.
        """
        with ExitStack() as held:
            began = time.perf_counter()
            is_again = alone or bool(damaged)
            stored = self.lookup.plan(task, damaged, held, again=is_again)
            plan, recompute = self.controller.decide(stored, task.request.method)
            record = self._recording(task, plan)
            length = plan.token_ids.numel()
            new_kv = None if self.offloading is None else self.offloading.new_kv(length)
            prepared = held.enter_context(
                self.fusor.prepared(
                    plan,
                    recompute,
                    headroom=task.prompt.answer_tokens,
                    record=record,
                    check=task.claim.check,
                    new_kv=new_kv,
                )
            )
            lookup_s = time.perf_counter() - began
            rows = inf if alone else prepared.most_rows
            with self.scheduler.prefills.joined(prepared, rows, task.claim) as prompts:
                if prompts:  # else another thread has computed this one
                    self.fusor.run(prompts, pause=self.scheduler.between_layers)
            passed = prepared.result()
        self.fusor.note_speed(passed)
        self.controller.learn_from(plan, recompute, passed)
        if keep is not None and record is not None:
            rope_digest = self.fusor.adapter.rope.digest(length)
            keep(task.prompt, rope_digest, record)
        reuse = reuse_report(plan, recompute, passed, self.fusor.adapter.layer_count)
        notes = (*damaged.values(), *task.prompt.notes, *reuse.notes)
        return self._prefilled(task, plan, replace(reuse, notes=notes), passed, record, lookup_s)

    def _prefilled(
        self,
        task: Task,
        plan: Plan,
        reuse: Reuse,
        passed: PassResult,
        record: Recording | None,
        lookup_s: float,
    ) -> PrefilledPrompt:
        length = plan.token_ids.numel()
        refused = self.offloading.refusal(length) if self.offloading else None
        elapsed_s = task.claim.elapsed_s()
        own_s = passed.pass_s - passed.others_s
        return PrefilledPrompt(
            token_ids=plan.token_ids,
            selected_by_layer=passed.selected_by_layer,
            logits=passed.logits,
            reuse=replace(reuse, notes=(*reuse.notes, refused)) if refused else reuse,
            timing=Timing(
                queue_s=elapsed_s - task.request.asked_after_s - lookup_s - own_s,
                lookup_s=lookup_s,
                load_s=passed.load_s,
                fuse_s=passed.fused.place_s,
                prefill_s=own_s,
                first_token_s=elapsed_s,
            ),
            kv=passed.fused.kv,
            turn_kv=self._turn_kv(task, plan, passed, record),
            spans=prompt_spans(plan, passed.selected_by_layer[-1], task.prompt),
        )

    def _recording(self, task: Task, plan: Plan) -> Recording | None:
        """A recording of all tokens that have no block, if their KV is kept.

        `None` also where no longer prompt could use it (dynamic RoPE).
        """
        prompt = task.prompt
        rope = self.fusor.adapter.rope
        length = plan.token_ids.numel()
        keeps = task.adds_turn or task.request.method.reuse == "prefix"
        if not keeps or rope.digest(length) != rope.digest(length + 1):
            return None
        blocks = prompt.blocks
        reused = blocks[: min(plan.lost_blocks, default=len(blocks))]
        start = len(prompt.prefix) + sum(map(len, reused))
        return self.fusor.adapter.new_recording(start, length + prompt.answer_tokens)

    def _turn_kv(
        self, task: Task, plan: Plan, passed: PassResult, record: Recording | None
    ) -> TurnKV | None:
        """The KV that a conversation may store, with the position up to which it is exact."""
        if record is None or not task.adds_turn:
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
            plan.lost_blocks,
            min(exact_until, end),
            self.fusor.adapter.rope.digest(length),
            stale and any(span.state is SpanState.FUSED for span in chunks),
        )
