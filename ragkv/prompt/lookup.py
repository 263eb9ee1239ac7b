"""Looks up what is stored of a prompt, and has the plan made of it (`planning.py`).

Leases are opened here and closed by the caller's exit stack.
"""

from collections.abc import Container
from contextlib import ExitStack
from dataclasses import replace

from ragkv.fusion import Plan
from ragkv.model import Adapter
from ragkv.prompt.history import Block, BlockWriter
from ragkv.scheduling import Scheduler
from ragkv.scheduling.encoding import BackgroundEncoder, Encoder
from ragkv.store import EntryKey, HintedEntry, Lease, PrefetchHint, Store

from .planning import Found, WantedRuns, plan_of, wanted
from .prefix_blocks import PrefixBlocks
from .prompt import Prompt
from .task import Task


class Lookup:
    """Finds the stored KV of prompts. Holds no request's state."""

    def __init__(
        self,
        adapter: Adapter,
        encoder: Encoder,
        store: Store,
        scheduler: Scheduler,
        block_writer: BlockWriter,
        background: BackgroundEncoder,
        prefix_blocks: PrefixBlocks,
        unused_note: str | None = None,
    ) -> None:
        """`background` is given every chunk whose entry is missing.

        `unused_note` says why stored entries are not reused; the first report of a cache miss has
        it.
        """
        self._adapter = adapter
        self._encoder = encoder
        self._store = store
        self._scheduler = scheduler
        self._block_writer = block_writer
        self._background = background
        self._prefix_blocks = prefix_blocks
        self._unreported = (unused_note,) if unused_note else ()

    def plan(self, task: Task, damaged: Container[EntryKey], leases: ExitStack) -> Plan:
        """The plan of a request's prompt, its leases opened on `leases`.

        An entry in `damaged` counts as a cache miss. Acquires the compute lock if the prefix has to
        be encoded. Raises what the task's work raises while it waits.
        """
        prompt = task.prompt
        runs = self._wanted(task)
        if not damaged:  # Otherwise only chunks wait that this request missed itself.
            self._background.finish(_wanted_ids(prompt, runs), task.work.check)
        found = self._find(task, runs, damaged, leases)
        plan = plan_of(prompt, task.request.method, runs, found)
        if plan.missed and self._unreported:
            plan = replace(plan, notes=(*plan.notes, *self._unreported))
            self._unreported = ()
        return plan

    def hint(self, task: Task) -> PrefetchHint:
        """What `plan` will look up in the store: history in order, then chunks."""
        runs = self._wanted(task)
        encoder = self._encoder
        base = self._block_writer.base
        blocks = [
            HintedEntry(
                identity := block.identity(base),
                block.token_ids,
                encoder.entry_bytes(len(block.token_ids), identity),
                task.session_id,
            )
            for block, run in zip(task.prompt.history.blocks, runs.blocks, strict=True)
            if run.is_wanted
        ]
        chunks = [
            HintedEntry(encoder.identity, ids, encoder.entry_bytes(len(ids)))
            for ids in _wanted_ids(task.prompt, runs)
        ]
        return PrefetchHint((*blocks, *chunks))

    def _wanted(self, task: Task) -> WantedRuns:
        frequencies = self._adapter.rope.frequencies(len(task.prompt.token_ids))
        return wanted(task.prompt, task.request.method, frequencies)

    def _find(
        self, task: Task, runs: WantedRuns, damaged: Container[EntryKey], leases: ExitStack
    ) -> Found:
        """Open what is stored of the wanted runs. Missing chunks go to the background encoder."""
        prompt = task.prompt
        reuse = task.request.method.reuse
        identity = self._encoder.identity

        def opened(lease: Lease | None) -> Lease | None:
            return None if lease is None else self._of_this_model(leases.enter_context(lease))

        def block_lease(block: Block) -> Lease | None:
            writer = self._block_writer
            return None if writer.key(block) in damaged else opened(writer.lease(block))

        def chunk_lease(ids: tuple[int, ...]) -> Lease | None:
            key = identity.key(ids)
            lease = None if key in damaged else opened(self._store.lease(identity, ids))
            if lease is None:
                self._background.add(ids)  # now, so that a later deletion cancels it
            return lease

        prefix = None
        if reuse != "none" and prompt.own_prefix:
            prefix = self._encoder.prefix(len(prompt.token_ids), self._scheduler.turn)
        blocks = zip(prompt.history.blocks, runs.blocks, strict=True)
        chunks = list(zip(prompt.stored_ids, runs.chunks, strict=True))
        return Found(
            prefix,
            tuple(block_lease(block) if run.is_wanted else None for block, run in blocks),
            tuple(chunk_lease(ids) if run.is_wanted else None for ids, run in chunks),
            frozenset(i for i, (ids, _) in enumerate(chunks) if identity.key(ids) in damaged),
            self._prefix_blocks.find(prompt, runs.frequencies) if reuse == "prefix" else (),
            tuple(self._store.away()),
        )

    def _of_this_model(self, lease: Lease) -> Lease | None:
        """The lease; `None` if its KV has another model's shape.

        A writer of shared storage can forge the shape.
        """
        info = lease.info
        shape = (info.layers, info.kv_heads, info.head_dim)
        return lease if shape == self._adapter.kv_shape else None


def _wanted_ids(prompt: Prompt, runs: WantedRuns) -> list[tuple[int, ...]]:
    """The ids of the chunks that are looked up."""
    chunks = zip(prompt.stored_ids, runs.chunks, strict=True)
    return [ids for ids, run in chunks if run.is_wanted]
