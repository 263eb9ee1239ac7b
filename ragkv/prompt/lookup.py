"""Looks up the stored runs of a prompt. `planning.py` makes the plan of them.

Leases are opened here and closed by the caller's exit stack. A lookup also waits for chunks that
another request had encoded, and queues chunks that are missing.
"""

from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ragkv.fusion import Plan, Span, SpanKind, SpanState
from ragkv.model import Adapter
from ragkv.prompt.history import BlockWriter
from ragkv.scheduling.encoding import BackgroundEncoder
from ragkv.store.entry import EntryKey, Identity
from ragkv.store.store import Store
from ragkv.store.tiers import Lease, MemoryLease

from .planning import plan_of, wanted_spans
from .prefix_blocks import PrefixBlocks
from .prompt import Prompt, Task, stored_ids


@dataclass(frozen=True, eq=False)
class Lookup:
    """Finds the stored KV of prompts. Holds no request's state."""

    adapter: Adapter
    identity: Identity  # that of chunks
    store: Store  # has the entries of chunks
    background: BackgroundEncoder  # is given every missing chunk
    block_writer: BlockWriter  # has the blocks of conversations
    prefix_blocks: PrefixBlocks
    prefix: MemoryLease | None  # the KV of the application's prefix, if it has one
    # why stored entries are not reused; the report of a cache miss has it
    why_not_reused: str | None

    def plan(
        self, task: Task, damaged: Container[EntryKey], leases: ExitStack, again: bool = False
    ) -> Plan:
        """The plan of a request's prompt, its leases opened on `leases`.

        An entry in `damaged` counts as a cache miss. If a chunk is being encoded because another
        request missed it, this request waits for it. If it looks `again`, it does not wait: it may
        have missed that chunk itself. Raises what the task's claim raises meanwhile.
        """
        prompt = task.prompt
        method = task.request.method
        rope_digest = self.adapter.rope.digest(len(prompt.token_ids))

        def looked_up(span: Span) -> Span:
            lease = self._lease(prompt, span, rope_digest, damaged)
            if span.kind is SpanKind.PREFIX or lease is None:
                return replace(span, lease=lease)
            leases.callback(lease.close)
            return replace(span, lease=self._of_this_model(lease))

        wanted = wanted_spans(prompt, method, rope_digest)
        spans = [looked_up(span) for span in wanted]
        missed = _missed_ids(prompt, spans)
        if missed and not again and self.background.encode_first(missed.values(), task.claim.check):
            spans = [looked_up(span) if span.chunk in missed else span for span in spans]
            missed = _missed_ids(prompt, spans)
        for ids in missed.values():
            self.background.add(ids)  # now, so that a later deletion cancels it
        plan = plan_of(
            prompt,
            method,
            spans,
            rope_digest,
            damaged={chunk for chunk, ids in missed.items() if self.identity.key(ids) in damaged},
            earlier=self.prefix_blocks.find(prompt, rope_digest)
            if method.reuse == "prefix"
            else (),
            away=self.store.away(),
        )
        if plan.missed and self.why_not_reused is not None:
            plan = replace(plan, notes=(*plan.notes, self.why_not_reused))
        return plan

    def _lease(
        self, prompt: Prompt, span: Span, rope_digest: str, damaged: Container[EntryKey]
    ) -> Lease | None:
        """The lease of a span that is stored; `None` if it is not, or is not wanted."""
        if span.state is SpanState.COMPUTED:
            return None
        if span.block is not None:
            writer = self.block_writer
            block = prompt.blocks[span.block]
            return None if writer.key(block) in damaged else writer.lease(block)
        if span.chunk is not None:
            ids = stored_ids(prompt.chunks[span.chunk])
            is_damaged = self.identity.key(ids) in damaged
            return None if is_damaged else self.store.lease(self.identity, ids)
        prefix = self.prefix
        fits = prefix is not None and prefix.info.rope_digest == rope_digest
        return prefix if fits else None

    def _of_this_model(self, lease: Lease) -> Lease | None:
        """The lease; `None` if its KV has another model's shape.

        A writer of shared storage can forge the shape.
        """
        info = lease.info
        shape = (info.layers, info.kv_heads, info.head_dim)
        return lease if shape == self.adapter.kv_shape else None


def _missed_ids(prompt: Prompt, spans: Sequence[Span]) -> dict[int, tuple[int, ...]]:
    """The stored ids of the chunks, by their index, that are wanted and have no lease."""
    return {
        span.chunk: stored_ids(prompt.chunks[span.chunk])
        for span in spans
        if span.chunk is not None and span.is_missed
    }
