"""Prefill: computes one prompt's KV and last logits (CacheBlend section 5.2).

The steps are look-up and plan, decision, fusing, report. If an entry proves to be damaged while it
is read, it becomes a cache miss of this request. The pass then starts again, because the rows of a
miss are computed from layer 0 on.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from ragkv.control import Controller
from ragkv.errors import EntryDamagedError
from ragkv.fusion import Fusor, PassResult, Plan, SpanKind, SpanState
from ragkv.model import Recording
from ragkv.scheduling import Scheduler
from ragkv.store import EntryKey
from ragkv.types import Timing

from .lookup import Lookup
from .prompt import Task
from .report import prompt_spans, reuse_report
from .request import PrefilledPrompt, TurnKV

if TYPE_CHECKING:
    from ragkv.model.kcache import Offloading


class _Tries:
    """What the passes of one prompt have found so far."""

    def __init__(self) -> None:
        # Entries that were found damaged, and how: each of them is a cache miss from now on.
        self.damaged: dict[EntryKey, str] = {}
        # A pass with other prompts failed as a whole, so the next pass has this prompt alone.
        self.alone = False
        self.lookup_s = 0.0

    @property
    def again(self) -> bool:
        """Whether this is not the first one."""
        return self.alone or bool(self.damaged)


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
        method = task.request.method
        # made now: it keeps no block of this prompt if anything is deleted from here on
        keep = self.lookup.prefix_blocks.keeper() if method.reuse == "prefix" else None
        tries = _Tries()
        outcome = None
        while outcome is None:
            outcome = self._pass(task, tries)
        plan, record, result = outcome
        self.fusor.learn(result)
        self.controller.learn(plan, method.selector, result)
        if keep is not None and record is not None:
            frequencies = self.fusor.adapter.rope.frequencies(len(task.prompt.token_ids))
            keep(task.prompt, frequencies, record)
        return self._prefilled(task, plan, result, record, tries)

    def _pass(
        self, task: Task, tries: "_Tries"
    ) -> tuple[Plan, Recording | None, PassResult] | None:
        """Plan the prompt, and pass it through the layers; `None` if it is to be tried again."""
        method = task.request.method
        with ExitStack() as leases:
            began = time.perf_counter()
            stored = self.lookup.plan(task, tries.damaged, leases, again=tries.again)
            plan = self.controller.decide(stored, method)
            record = self._recording(task, plan)
            length = plan.token_ids.numel()
            new_kv = None if self.offloading is None else self.offloading.new_kv(length)
            prepared = leases.enter_context(
                self.fusor.prepared(
                    plan,
                    method.selector,
                    headroom=task.prompt.answer_tokens,
                    record=record,
                    check=task.claim.check,
                    new_kv=new_kv,
                )
            )
            tries.lookup_s += time.perf_counter() - began
            rows = inf if tries.alone else prepared.most_rows
            run = partial(self.fusor.run, pause=self.scheduler.between_layers)
            self.scheduler.prefills.run(prepared, rows, task.claim, run)
            try:
                result = prepared.result()
            except EntryDamagedError as error:
                if error.key in tries.damaged:
                    raise  # The entry was a miss this time, so trying again would never end.
                tries.damaged[error.key] = str(error)
                return None
        if result is None:
            tries.alone = True
            return None
        return plan, record, result

    def _prefilled(
        self,
        task: Task,
        plan: Plan,
        passed: PassResult,
        record: Recording | None,
        tries: "_Tries",
    ) -> PrefilledPrompt:
        fused = passed.fused
        length = plan.token_ids.numel()
        refused = self.offloading.refusal(length) if self.offloading else None
        elapsed_s = task.claim.elapsed_s()
        own_s = passed.pass_s - passed.others_s
        reuse = reuse_report(
            plan, task.request.method.selector, passed, self.fusor.adapter.layer_count
        )
        notes = (
            *tries.damaged.values(),
            *task.prompt.notes,
            *reuse.notes,
            *filter(None, [refused]),
        )
        return PrefilledPrompt(
            token_ids=plan.token_ids,
            selected_by_layer=passed.selected_by_layer,
            logits=passed.logits,
            reuse=replace(reuse, notes=notes),
            timing=Timing(
                queue_s=elapsed_s - task.request.began_s - tries.lookup_s - own_s,
                lookup_s=tries.lookup_s,
                load_s=passed.load_s,
                fuse_s=fused.place_s,
                prefill_s=own_s,
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
        keeps = task.adds_turn or task.request.method.reuse == "prefix"
        if not keeps or rope.frequencies(length) != rope.frequencies(length + 1):
            return None
        blocks = prompt.blocks
        reused = blocks[: min(plan.recomputed_blocks, default=len(blocks))]
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
            plan.recomputed_blocks,
            min(exact_until, end),
            self.fusor.adapter.rope.frequencies(length),
            stale and any(span.state is SpanState.FUSED for span in chunks),
        )
