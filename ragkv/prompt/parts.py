"""What an engine is built of, and how it is put together.

`SharedModel` is a loaded model with what every engine on it shares. `EngineParts` is one engine's own: its store, its
encoder, its planner. Calibration and benchmarks work on these parts; applications use the `Engine` alone.
"""

import logging
import os
from dataclasses import dataclass, replace
from typing import Any, Self

from ragkv.config import EngineConfig
from ragkv.errors import InputError
from ragkv.fusion import Fusor, Readers, ScoreModel, Scorer, gate_result, learned, make_selector
from ragkv.model import Adapter, adapt
from ragkv.model.decode.decoding import end_tokens
from ragkv.model.dtype_choice import DtypeChoice
from ragkv.model.fingerprint import architecture_digest, rope_digest, tokenizer_digest, weights_digest
from ragkv.model.kcache import Offloading
from ragkv.model.layout import TemplateRuns, template_runs
from ragkv.prompt.constraints import ConstraintTokenizer, Grammars
from ragkv.prompt.history import BlockWriter
from ragkv.runtime import limit_kernel_caches
from ragkv.scheduling import ModelTurns, Scheduler
from ragkv.scheduling.encoding import BackgroundEncoder, Encoder, Warmer
from ragkv.store import Identity, Store, dtype_name

from .generation import AnswerGenerator
from .intake import Intake
from .load_control import LoadControl, subject_of
from .planner import Planner
from .prefill import Prefiller
from .unusable import other_dtype_note

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A loaded model. All engines on it compute one after another and decode together."""

    adapter: Adapter
    tokenizer: Any | None
    identity: Identity  # of every entry this model makes; an engine adds its application's part
    turns: ModelTurns
    dtype_choice: DtypeChoice
    constraint_tokenizer: ConstraintTokenizer

    @classmethod
    def of(cls, model: Any, tokenizer: Any | None, config: EngineConfig, choice: DtypeChoice | None = None) -> Self:
        """Adapt a loaded transformers model. Raises `UnsupportedModelError` if its KV cannot be fused exactly.

        `choice` says why it was loaded in its dtype; `None`: the caller loaded it. Raises `InputError` for a name.
        """
        if isinstance(model, str | os.PathLike):
            raise InputError(
                f"Engine takes a loaded model, not the name {str(model)!r}. Load it by name with "
                f"Engine.from_pretrained({str(model)!r}), or with transformers, and pass model and tokenizer."
            )
        limit_kernel_caches()
        adapter = adapt(model, config.packed_bytes)
        identity = Identity(
            weights=weights_digest(adapter.model),
            architecture=architecture_digest(adapter),
            rope=rope_digest(adapter),
            dtype=dtype_name(adapter.dtype),
            adapter="",
            tokenizer=tokenizer_digest(tokenizer),
            context="",
        )
        choice = choice or DtypeChoice(identity.dtype, f"{identity.dtype}, in which the model was given")
        log.info("The model computes in %s.", choice.why)
        turns = ModelTurns(adapter, config.scheduler.batch_rows)
        constraint_tokenizer = ConstraintTokenizer(tokenizer, adapter.vocabulary, end_tokens(adapter.model, tokenizer))
        return cls(adapter, tokenizer, identity, turns, choice, constraint_tokenizer)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine. They hold no request's state and are safe to use from any thread."""

    shared: SharedModel
    identity: Identity  # of this engine's entries, whatever context they saw
    runs: TemplateRuns
    intake: Intake
    store: Store
    readers: Readers
    fusor: Fusor
    encoder: Encoder
    background: BackgroundEncoder
    warmer: Warmer
    scheduler: Scheduler
    block_writer: BlockWriter
    load_control: LoadControl
    planner: Planner
    prefiller: Prefiller
    generator: AnswerGenerator
    unused_note: str | None  # why entries of an earlier run are not reused; None: they are, or there are none

    @property
    def adapter(self) -> Adapter:
        """The model, driven layer by layer."""
        return self.shared.adapter

    @classmethod
    def build(cls, shared: SharedModel, config: EngineConfig) -> Self:
        """Open the store and build every part. Whatever is refused is refused before the store is opened."""
        adapter, settings, fusion = shared.adapter, config.store, config.fusion
        bos_token_id = getattr(adapter.config, "bos_token_id", None)
        runs = template_runs(shared.tokenizer, bos_token_id, config.prompt.system)
        intake = Intake(adapter, shared.tokenizer, runs, config, Grammars(shared.constraint_tokenizer))
        identity = replace(shared.identity, adapter=config.adapter_id, tenant=settings.tenant, codec=settings.codec)

        cuda = adapter.device.type == "cuda"
        store = Store.open(settings, page_locked=cuda, block_tokens=config.session.block_tokens)
        scheduler = Scheduler(shared.turns, config.scheduler, store)
        readers = Readers(settings.reader_threads)
        fusor = Fusor(adapter, readers, fusion.read_ahead_layers, fusion.seed)
        network = _learned_scores(adapter, config)

        prefix, texts = runs.before_documents, fusion.sensitivity_prefixes
        scorer = Scorer(adapter, prefix, texts, scheduler.between_layers, network) if texts else None
        needs_scores = make_selector(fusion.selector).needs_scores
        encoder = Encoder(adapter, prefix, identity, scorer, scheduler.between_layers, makes_scores=needs_scores)
        background = BackgroundEncoder(encoder, store, scheduler)
        if settings.directory is not None:
            intake.apply_gate_result(gate_result.load(settings.directory, encoder.measured_as, fusion))
        block_writer = BlockWriter(store, identity, config.session.save_buffer_bytes)
        subject = subject_of(adapter, encoder.identity)
        load_control = LoadControl(subject, settings.directory, config.controller.prices, store.speeds)
        unused = other_dtype_note(store, identity, shared.dtype_choice.why)
        if unused is not None:
            log.info("In %s %s.", settings.directory, unused)
        planner = Planner(adapter, encoder, store, scheduler, block_writer, background, unused)
        offloading = Offloading(adapter, config.kcache)
        prefiller = Prefiller(planner, fusor, scheduler, load_control, offloading)
        return cls(
            shared=shared,
            identity=identity,
            runs=runs,
            intake=intake,
            store=store,
            readers=readers,
            fusor=fusor,
            encoder=encoder,
            background=background,
            warmer=Warmer(encoder, store, scheduler, background.single_flight),
            scheduler=scheduler,
            block_writer=block_writer,
            load_control=load_control,
            planner=planner,
            prefiller=prefiller,
            generator=AnswerGenerator(adapter, shared.tokenizer, scheduler.batch),
            unused_note=unused,
        )


def _learned_scores(adapter: Adapter, config: EngineConfig) -> ScoreModel | None:
    """The score network of the home or of the model's folder, if the settings want one and it fits them."""
    if not config.fusion.learned_scores or config.fusion.sensitivity_prefixes != learned.TEXTS:
        return None
    return learned.load_for(adapter, config.store.directory)


__all__ = ["EngineParts", "SharedModel"]
