"""Builds the parts of an engine. Only this module knows all of them.

The order matters. Everything that can be refused is refused before the store is opened, and threads
end in the opposite order (`Parts.close`). Most parts are plain values until their first use.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from .config import MIB, EngineConfig
from .control import Controller, Methods, ProfileInUse, Profiler
from .control.gate_result import FILE_NAME as GATE_FILE
from .control.gate_result import GateResult
from .control.gate_result import load as load_gate_result
from .entries import Entries
from .fusion import Fusor, Readers
from .prompt import (
    AnswerBackend,
    Intake,
    LocalBackend,
    Lookup,
    Prefiller,
    PrefixBlocks,
    SharedModel,
)
from .prompt.history import BlockWriter
from .prompt.template import template_runs
from .runtime import close_elsewhere, is_missing
from .scheduling import IdleTime, Scheduler
from .scheduling.encoding import BackgroundEncoder, Encoder, neutral_ids
from .sessions import SESSIONS, FolderStorage, HistoryBlocks, Sessions, SessionStorage
from .store.entry import Entry, Identity
from .store.job_queue import JobQueue
from .store.opening import open_store
from .store.store import Store
from .store.tiers import TierKind

if TYPE_CHECKING:
    from .model.kcache import Offloading

log = logging.getLogger(__name__)

# Makes what computes the answers of an engine, instead of its own model.
BackendMaker = Callable[[SharedModel, Entries, Scheduler], AnswerBackend]

# Blocks of earlier prompts (`reuse="prefix"`) may add this part of the store's memory to it.
PREFIX_SHARE = 4
# Entries of one model have these fields in common, whatever its dtype.
OF_ANY_DTYPE = ("architecture", "rope_parameters", "tokenizer", "lora")
SAMPLE = 64  # entries are looked at for their dtype: reading one takes a tenth of a millisecond
# The size of the buffer of turns that are saved, where memory has no tier.
LEAST_BUFFER_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one engine. None refers to it, so an engine that nobody holds is freed."""

    intake: Intake
    store: Store
    scheduler: Scheduler
    idle_time: IdleTime
    fusor: Fusor
    controller: Controller
    profiler: Profiler
    sessions: Sessions
    entries: Entries
    backend: AnswerBackend

    def close(self) -> None:
        """Stop the threads, then close what they use. An error of one part keeps no other open.

        On a thread that computes, or that is to be stopped, another thread closes what that one
        uses, once it has ended.
        """
        if self.idle_time.compute.lock.is_mine:
            close_elsewhere(self.close)
            return
        with ExitStack() as used:  # the last one first
            used.callback(self.fusor.readers.close)
            used.callback(self.store.close)
            used.callback(self.sessions.close)
            used.callback(self.scheduler.close)  # after the pass under way
            try:
                self.profiler.close()
            finally:
                if not self.entries.background.close():
                    used.pop_all()
                    close_elsewhere(self.close)


def assembled(
    model: SharedModel, config: EngineConfig, maker: BackendMaker | None, store: Store | None
) -> Parts:
    """The parts of an engine on `model`. `maker` makes what computes the answers, if not `model`.

    Without `store` the one that the config describes is opened. If this fails, what it opened is
    closed again.
    """
    bos = getattr(model.adapter.config, "bos_token_id", None)
    runs = template_runs(model.tokenizer, bos, config.prompt.system)
    prefix_ids = runs.before_documents
    neutral = neutral_ids(model.tokenizer) if config.fusion.stored_kv == "expected" else ()
    identity = model.chunk_identity(config, prefix_ids, neutral)
    methods = Methods(config, _gate_result(config, identity))
    intake = Intake(model, runs, config, methods)

    with ExitStack() as opened:
        # what is stored
        if store is None:
            store = _store(model, config)
            opened.callback(store.close)
        block_writer = _block_writer(model, config, store)
        opened.callback(block_writer.close)
        storage = _session_storage(model, config, block_writer.base)
        blocks = HistoryBlocks(block_writer, storage)
        sessions = Sessions(model.adapter, runs, config, storage, blocks)
        opened.callback(sessions.close)
        prefix_blocks = PrefixBlocks(
            model.identity_for(config), config.store.memory_bytes // PREFIX_SHARE
        )

        # who computes
        scheduler = Scheduler(
            model.compute, config.scheduler, store.prefetcher, config.store.tenant
        )
        between = scheduler.between_layers
        encoder = Encoder(model.adapter, identity, prefix_ids, neutral, model.contexts, between)
        idle_time = IdleTime(model.compute, scheduler)
        background = BackgroundEncoder(encoder, store, idle_time)
        opened.callback(background.close)
        entries = Entries(
            encoder=encoder,
            store=store,
            background=background,
            intake=intake,
            prefix_blocks=prefix_blocks,
            announcing=sessions.announcing,
            why_not_reused=_why_not_reused(store, identity, model.dtype_choice.why),
        )
        readers = Readers(config.store.reader_threads)
        opened.callback(readers.close)
        fusor = Fusor(model.adapter, readers, config.fusion.read_ahead_layers, config.fusion.seed)
        in_use = ProfileInUse(model.adapter, identity, store, config.store.directory)
        controller = Controller(in_use, methods)
        profiler = Profiler(in_use, controller, fusor, idle_time, config, block_writer.store)

        # who answers
        backend: AnswerBackend
        if maker is not None:
            backend = maker(model, entries, scheduler)
        else:
            lookup = _lookup(model, entries, block_writer, scheduler)
            offloading = _offloading(model, config)
            prefiller = Prefiller(lookup, fusor, scheduler, controller, offloading)
            backend = LocalBackend(model, scheduler, lookup, prefiller, config.drafts)

        # what a home may have from before
        # Read once: no other process measures this store while it is open.
        if (profile := in_use.saved()) is not None:
            profiler.use(profile)
        if _has_sessions(config, block_writer.store):
            sessions.begin(_kept_in(config))
        if maker is None and _wants_profile(config):
            profiler.start()
        opened.pop_all()
    return Parts(
        intake,
        store,
        scheduler,
        idle_time,
        fusor,
        controller,
        profiler,
        sessions,
        entries,
        backend,
    )


def _store(model: SharedModel, config: EngineConfig) -> Store:
    """The store that the config describes, opened."""
    return open_store(
        config.store,
        page_locked=model.adapter.device.type == "cuda",
        block_tokens=config.session.block_tokens,
    )


def _block_writer(model: SharedModel, config: EngineConfig, store: Store) -> BlockWriter:
    """What saves histories: next to the chunks in `store`, or on disk in a directory of their
    own. Its buffer has room for a whole context window, as far as memory may take that.
    """
    session = config.session
    settings = config.store
    base = replace(model.identity_for(config), codec=settings.codec or "raw")
    capacity_bytes = session.save_buffer_bytes
    if capacity_bytes is None:
        capacity_bytes = max(settings.memory_bytes, LEAST_BUFFER_BYTES)
        window = model.adapter.context_length
        if window is not None:
            capacity_bytes = min(capacity_bytes, window * model.adapter.kv_bytes_per_token)
    worker = JobQueue[Entry](capacity_bytes, "ragkv-saver")
    if session.directory is None:
        return BlockWriter(store, base, worker)
    own = replace(settings, directory=session.directory, read_only=False)
    on_disk = open_store(own, TierKind.DISK, block_tokens=session.block_tokens)
    return BlockWriter(on_disk, base, worker, owns_store=True)


def _kept_in(config: EngineConfig) -> Path | None:
    """The folder for what sessions keep when the process ends; `None`: nothing."""
    store = config.store
    folder = config.session.directory or (None if store.read_only else store.directory)
    return None if folder is None else Path(folder)


def _session_storage(model: SharedModel, config: EngineConfig, base: Identity) -> SessionStorage:
    """Where the states of sessions are kept. Nothing is read yet, and no server is asked."""
    if not config.session.shared:
        return FolderStorage(_kept_in(config), base)
    # Imported by name: that package is above this one, and one machine alone never needs it.
    open_shared: Callable[..., SessionStorage] = resolve_name("ragkv.cluster:open_session_storage")
    # `EngineConfig` refuses shared sessions without a server
    return open_shared(config.store.redis, base, model.adapter.vocabulary)


def _has_sessions(config: EngineConfig, blocks: Store) -> bool:
    """Whether earlier processes may have left sessions, or other replicas have some."""
    folder = _kept_in(config)
    return (
        config.session.shared
        or (folder is not None and (folder / SESSIONS).is_dir())
        or any(tier.ledger is not None and tier.ledger.block_keys() for tier in blocks.tiers)
    )


def _gate_result(config: EngineConfig, identity: Identity) -> GateResult | None:
    """What the quality gate found for such an engine, if it was applied."""
    directory = config.store.directory
    if directory is None or is_missing(Path(directory, GATE_FILE)):
        return None
    return load_gate_result(directory, identity, config.fusion)


def _lookup(
    model: SharedModel, entries: Entries, block_writer: BlockWriter, scheduler: Scheduler
) -> Lookup:
    """What finds the stored KV of prompts. The KV of the prefix is computed now."""
    encoder = entries.encoder
    with scheduler.computing():
        prefix = model.contexts.prefix(encoder.prefix_ids, encoder.identity, encoder.between)
    return Lookup(
        adapter=model.adapter,
        identity=encoder.identity,
        store=entries.store,
        background=entries.background,
        block_writer=block_writer,
        prefix_blocks=entries.prefix_blocks,
        prefix=prefix,
        why_not_reused=entries.why_not_reused,
    )


def _offloading(model: SharedModel, config: EngineConfig) -> "Offloading | None":
    """Where V is kept in host memory while an answer decodes, if it is."""
    if config.kcache is None:
        return None
    from .model.kcache import Offloading

    return Offloading(model.adapter, config.kcache)


def _wants_profile(config: EngineConfig) -> bool:
    """Whether a profile decides something, and may be measured and kept."""
    settings = config.store
    decides = config.fusion.ratio is None or settings.ttft_target_ms is not None
    return decides and config.controller.measure and not settings.read_only


def _why_not_reused(store: Store, own: Identity, dtype_why: str) -> str | None:
    """Why nothing stored on this machine is reused, if entries of this model were made in another
    dtype. The log says it, too.

    `own` is the identity of an engine's chunks, and `dtype_why` says why it has its dtype. `None`
    if some entries are of its dtype, or none of this model. The weights are not compared: their
    digest depends on the dtype.
    """
    here = (tier for tier in store.tiers if not tier.is_remote)
    infos = (info for tier in here for _, info in tier.scan() if info is not None)
    found = {
        info.identity.dtype
        for info in islice(infos, SAMPLE)
        if all(getattr(info.identity, name) == getattr(own, name) for name in OF_ANY_DTYPE)
    }
    if not found or own.dtype in found:
        return None
    others = " and ".join(sorted(found))
    note = (
        f"the entries stored here were made in {others} and are not reused, because the model "
        f"computes in {dtype_why}. "
        f"Set dtype = {min(found)} to use them, or delete them with `ragkv gc`"
    )
    log.info("Stored KV is not used: %s.", note)
    return note
