"""What an engine is made of, put together: the one place that knows all parts.

The order matters. Whatever is refused is refused before the store is opened, and threads end in the
opposite order (`Parts.close`).
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .config import EXPECTED_CODEC, EngineConfig
from .control import Controller, Methods, Profile, Profiler
from .conversations import Conversations
from .entries import Entries, other_dtype_note
from .fusion import Fusor, Readers
from .prompt import (
    AnswerBackend,
    Intake,
    Lookup,
    OwnModel,
    Prefiller,
    PrefixBlocks,
    SharedModel,
)
from .prompt.history import BlockWriter
from .prompt.template import template_runs
from .scheduling import Scheduler
from .scheduling.encoding import BackgroundEncoder, Encoder, neutral_ids
from .store import Store

if TYPE_CHECKING:
    from .model.kcache import Offloading

# Makes what computes the answers of an engine, instead of its own model.
BackendMaker = Callable[[SharedModel, Entries, Scheduler], AnswerBackend]

# Blocks of earlier prompts (`reuse="prefix"`) may take this part of the store's memory on top of it.
PREFIX_SHARE = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one engine. They know each other and not the engine, so that it can go."""

    intake: Intake
    store: Store
    scheduler: Scheduler
    fusor: Fusor
    controller: Controller
    profiler: Profiler
    background: BackgroundEncoder
    conversations: Conversations
    entries: Entries
    backend: AnswerBackend

    def close(self) -> None:
        """Stop the threads, then close what they use. An error of one part keeps no other open.

        Garbage collection may call this on a thread that is to be stopped. Then another thread
        closes what it uses, once it has ended.
        """
        with ExitStack() as used:  # the last one first
            used.callback(self.fusor.readers.close)
            used.callback(self.store.close)
            used.callback(self.conversations.close)
            used.callback(self.scheduler.close)  # after the pass under way
            try:
                self.profiler.close()
            finally:
                if not self.background.close():
                    used.pop_all()
                    threading.Thread(target=self.close, name="ragkv-closer").start()


def assembled(
    model: SharedModel, config: EngineConfig, maker: BackendMaker | None, store: Store | None
) -> Parts:
    """The parts of an engine on `model`. `maker` makes what computes the answers, if not `model`.

    Without `store` the one that the config describes is opened. If this fails, what it opened is
    closed again.
    """
    with ExitStack() as opened:
        parts = _assembled(model, config, maker, store, opened)
        opened.pop_all()
    return parts


def _assembled(
    model: SharedModel,
    config: EngineConfig,
    maker: BackendMaker | None,
    store: Store | None,
    opened: ExitStack,
) -> Parts:
    """See `assembled`; `opened` gets what is to be closed if this fails."""
    bos = getattr(model.adapter.config, "bos_token_id", None)
    methods = Methods(config)
    runs = template_runs(model.tokenizer, bos, config.prompt.system)
    intake = Intake(model, runs, config, methods)

    # What is stored, who makes it, and who computes next.
    settings = config.store
    page_locked = model.adapter.device.type == "cuda"
    blocks = config.session.block_tokens
    if store is None:
        store = Store.open(settings, page_locked=page_locked, block_tokens=blocks)
        opened.callback(store.close)
    scheduler = Scheduler(model.compute, config.scheduler, store, settings.tenant)
    encoder = _encoder(model, config, intake, scheduler)
    background = BackgroundEncoder(encoder, store, scheduler)
    opened.callback(background.close)
    own = replace(model.identity, adapter=config.adapter_id, tenant=settings.tenant)
    base = replace(own, codec=settings.codec or "raw")
    block_writer = BlockWriter.open(config, store, base, model.adapter)
    opened.callback(block_writer.close)
    conversations = Conversations.open(model.adapter, intake.runs, block_writer, config)
    opened.callback(conversations.close)
    prefix_blocks = PrefixBlocks(own, settings.memory_bytes // PREFIX_SHARE)
    unused = other_dtype_note(store, encoder.identity, model.dtype_choice.why)
    telling = conversations.telling
    entries = Entries(intake, encoder, store, scheduler, background, prefix_blocks, telling, unused)

    # How a prompt is computed, and who answers.
    readers = Readers(settings.reader_threads)
    opened.callback(readers.close)
    fusor = Fusor(model.adapter, readers, config.fusion.read_ahead_layers, config.fusion.seed)
    controller = _controller(model, config, methods, store, encoder, block_writer)
    profiler = Profiler(controller, fusor, scheduler)
    backend: AnswerBackend
    if maker is not None:
        backend = maker(model, entries, scheduler)
    else:
        with scheduler.computing():
            prefix = encoder.prefix()
        lookup = Lookup(
            model.adapter,
            encoder.identity,
            prefix,
            store,
            block_writer,
            background,
            prefix_blocks,
            unused,
        )
        offloading = _offloading(model, config)
        prefiller = Prefiller(lookup, fusor, scheduler, controller, prefix_blocks, offloading)
        backend = OwnModel(lookup, prefiller, scheduler, model, config.drafts)
        if _wants_profile(config):
            profiler.start()
    return Parts(
        intake,
        store,
        scheduler,
        fusor,
        controller,
        profiler,
        background,
        conversations,
        entries,
        backend,
    )


def _offloading(model: SharedModel, config: EngineConfig) -> "Offloading | None":
    """Where V is kept in host memory while an answer decodes, if it is."""
    if config.kcache is None:
        return None
    from .model.kcache import Offloading

    return Offloading(model.adapter, config.kcache)


def _encoder(
    model: SharedModel, config: EngineConfig, intake: Intake, scheduler: Scheduler
) -> Encoder:
    """What encodes chunks behind the application's prefix and the neutral text."""
    is_expected = config.fusion.stored_kv == "expected"
    neutral = neutral_ids(model.tokenizer) if is_expected else ()
    identity = replace(
        model.identity,
        adapter=config.adapter_id,
        tenant=config.store.tenant,
        codec=config.store.codec or (EXPECTED_CODEC if neutral else "raw"),
    )
    return Encoder(
        model.adapter,
        intake.runs.before_documents,
        identity,
        scheduler.between_layers,
        neutral_ids=neutral,
        contexts=model.contexts,
    )


def _controller(
    model: SharedModel,
    config: EngineConfig,
    methods: Methods,
    store: Store,
    encoder: Encoder,
    block_writer: BlockWriter,
) -> Controller:
    """What decides how prompts are computed, with the gate's result and the saved profile."""
    directory = config.store.directory
    if directory is not None:
        from .control import gate_result

        methods.follow(gate_result.load(directory, encoder.identity, config.fusion))

    def on_profile(profile: Profile) -> None:
        target_ms = config.store.ttft_target_ms
        block_writer.aim(target_ms, config.session.block_tokens, profile)
        store.place_again()

    controller = Controller(
        model.adapter,
        encoder.identity,
        directory,
        config.controller.prices,
        methods,
        store.speeds,
        on_profile,
    )
    if config.controller.place:
        store.place_by(controller.in_memory)
    return controller


def _wants_profile(config: EngineConfig) -> bool:
    """Whether a profile decides something, and may be measured and kept."""
    settings = config.store
    decides = config.fusion.ratio is None or settings.ttft_target_ms is not None
    return decides and config.controller.measure and not settings.read_only
