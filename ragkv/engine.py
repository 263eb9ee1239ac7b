"""The engine: answers questions over chunks from stored KV. `Engine.stream` is the main path.

Validate and tokenize -> wait for the session's turn and to be admitted -> find entries and plan ->
load and fuse, layer by layer -> decode -> store the turn's new KV in the background. The engine
holds no request's state: any number of threads may call it, and their passes over the model run one
after another.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, Unpack

from .config import EXPECTED_CODEC, EngineConfig
from .conversations import Conversations, Session, Turn
from .entries import Entries, other_dtype_note
from .errors import RagKVError, UnsupportedError, check_kind
from .fusion import Fusor, Readers
from .model.loading import load
from .prompt import (
    ActiveRequest,
    AnswerBackend,
    AnswerEvents,
    AnswerGenerator,
    AnswerOptions,
    ChunkLike,
    Intake,
    LoadControl,
    ModelBackend,
    Planner,
    Prefill,
    Prefiller,
    PrefillOptions,
    Profiler,
    Request,
    SharedModel,
)
from .prompt.history import BlockWriter
from .prompt.layout import template_runs
from .runtime import Check, Closing, limit_kernel_caches, no_check, openmp
from .scheduling import QueueStats, Scheduler
from .scheduling.encoding import BackgroundEncoder, Encoder, WarmReport, neutral_ids
from .store import Identity, RemoteStats, Store, StoreStats
from .types import Answer, Chunk, TokenEvent

# Makes what computes the answers of an engine, instead of its own model.
BackendMaker = Callable[[SharedModel, Entries], AnswerBackend]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is and holds."""

    architecture: str
    layers: int
    kv_bytes_per_token: int
    dtype: str  # of weights and KV: "float32", ...
    dtype_why: str  # why that one, in a sentence
    store: StoreStats
    queue: QueueStats
    # the server of shared conversations; None: they are not shared
    sessions: RemoteStats | None = None

    @property
    def remotes(self) -> dict[str, RemoteStats]:
        """The health of everything that replicas share: remote tiers by their kind, and
        "conversations".
        """
        tiers = {
            tier.kind.value: tier.remote for tier in self.store.tiers if tier.remote is not None
        }
        return tiers if self.sessions is None else {**tiers, "conversations": self.sessions}


class Engine(Closing):
    """One model, its store, and the path from question to answer.

    `entries` and `conversations` are the doors to what is stored. Who measures or serves also finds
    here the `model` that engines share, the `intake` of requests, the `store`, the `scheduler`, the
    `fusor`, the `load_control` and its `profiler`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        config: EngineConfig | None = None,
        backend: BackendMaker | None = None,
    ) -> None:
        """Build on a loaded transformers causal LM, on its device and in its dtype; it is put in
        eval mode.

        `with_config` passes a `SharedModel` instead. `backend` makes what computes the answers, if
        the model here does not. Raises `UnsupportedModelError` for a model whose KV cannot be fused
        exactly.
        """
        check_kind("config", config, EngineConfig, type(None))
        self.config = config = config or EngineConfig()
        self.model = (
            model if isinstance(model, SharedModel) else SharedModel.of(model, tokenizer, config)
        )
        adapter = self.model.adapter
        directory = config.store.directory
        tokenizer = self.model.tokenizer

        # What requests say. Whatever is refused is refused before the store is opened.
        runs = template_runs(
            tokenizer, getattr(adapter.config, "bos_token_id", None), config.prompt.system
        )
        self.intake = Intake(self.model, runs, config)

        # What is stored, and who makes it.
        self.store = store = Store.open(
            config.store,
            page_locked=adapter.device.type == "cuda",
            block_tokens=config.session.block_tokens,
        )
        self.scheduler = scheduler = Scheduler(self.model.turns, config.scheduler, store)
        settings = config.store
        own = self.model.identity
        identity = replace(
            own, adapter=config.adapter_id, tenant=settings.tenant, codec=settings.codec or "raw"
        )
        encoder = self._encoder(identity)
        background = BackgroundEncoder(encoder, store, scheduler)
        block_writer = BlockWriter.open(config, store, identity, adapter)
        unused = other_dtype_note(store, identity, self.model.dtype_choice.why)

        # How a prompt is planned and fused.
        if directory is not None:
            from .fusion import gate_result

            self.intake.apply_gate_result(
                gate_result.load(directory, encoder.identity, config.fusion)
            )
        prices = config.controller.prices
        method = partial(self.intake.method, PrefillOptions())
        aim = partial(block_writer.aim, settings.ttft_target_ms, config.session.block_tokens)
        self.load_control = LoadControl(
            adapter, encoder.identity, directory, prices, method, store.speeds, aim
        )
        readers = Readers(settings.reader_threads)
        self.fusor = Fusor(adapter, readers, config.fusion.read_ahead_layers, config.fusion.seed)
        self.profiler = Profiler(self.load_control, self.fusor, scheduler)
        if config.controller.place:
            store.place_by(self.load_control.in_memory)
        planner = Planner(adapter, encoder, store, scheduler, block_writer, background, unused)
        offloading = None
        if config.kcache is not None:
            from .model.kcache import Offloading

            offloading = Offloading(adapter, config.kcache)
        prefiller = Prefiller(planner, self.fusor, scheduler, self.load_control, offloading)

        # Who waits, who answers, and what is kept of it.
        self._conversations = Conversations.open(adapter, runs, block_writer, config)
        self._entries = Entries(
            self.intake,
            encoder,
            store,
            scheduler,
            background,
            self._conversations.telling,
            config,
            unused,
        )
        if backend is not None:
            self._backend = backend(self.model, self._entries)
        else:
            generator = AnswerGenerator(adapter, tokenizer, scheduler.batch, config.drafts)
            self._backend = ModelBackend(planner, prefiller, generator)
        # Also runs when the engine is garbage-collected or the process ends: no thread may be
        # inside the model then.
        self._shut = weakref.finalize(
            self, _shut, background, self.profiler, scheduler, self._conversations, store, readers
        )
        chooses = (
            config.fusion.ratio is None or settings.ttft_target_ms is not None
        ) and backend is None
        has_storage = directory is not None or settings.redis is not None or settings.s3 is not None
        if chooses and config.controller.measure and has_storage and not settings.read_only:
            self.profiler.start()
        # this thread loaded and packed weights; another one may compute next
        openmp.release_threads()

    def _encoder(self, identity: Identity) -> Encoder:
        """What encodes chunks behind the application's prefix."""
        is_expected = self.config.fusion.stored_kv == "expected"
        return Encoder(
            self.model.adapter,
            self.intake.runs.before_documents,
            identity,
            self.scheduler.between_layers_of_chunks,
            neutral_ids=neutral_ids(self.model.tokenizer) if is_expected else (),
            codec=self.config.store.codec or EXPECTED_CODEC,
            contexts=self.model.contexts,
        )

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], config: EngineConfig | None = None
    ) -> Self:
        """Build on a model folder, a GGUF file, a hub id or `"smollm2"`, on the config's device and
        dtype, with the config's LoRA adapter and kind of weights.

        The dtype "auto" is on a CPU the one in which it computes the model fastest
        (`model/dtype_choice.py`).
        """
        from .model.dtype_choice import choose_dtype

        check_kind("name", name, str, os.PathLike)
        check_kind("config", config, EngineConfig, type(None))
        config = config or EngineConfig()
        limit_kernel_caches()  # before the first product, by which the dtype is chosen
        store_bytes = config.store.memory_bytes
        weights = config.weights
        choice = choose_dtype(
            name, config.device, config.dtype, store_bytes, config.packed_bytes, weights
        )
        model, tokenizer = load(
            name, config.device, choice.name, config.adapter, config.weights, config.packed_bytes
        )
        return cls(SharedModel.of(model, tokenizer, config, choice), config=config)

    def with_config(self, config: EngineConfig, backend: BackendMaker | None = None) -> Self:
        """A second engine on the same loaded model: both compute one after another and decode
        together.

        It has its own store and sessions and is closed by itself: give it another directory or
        none. `device`, `dtype`, `weights` and `packed_bytes` stay those of the first engine,
        whatever `config` says.
        """
        self._check_open()
        return type(self)(self.model, config=config, backend=backend)

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self.model.tokenizer

    @property
    def entries(self) -> Entries:
        """The stored entries of chunks: encode later, delete. Raises `RagKVError` once
        closed.
        """
        self._check_open()
        return self._entries

    @property
    def conversations(self) -> Conversations:
        """All conversations: list, open, delete. Raises `RagKVError` once closed."""
        self._check_open()
        return self._conversations

    def answer(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Answer:
        """The answer to `question` over `chunks`. Takes the options of `stream` and raises what it
        raises.

        If no other request waits, this returns when the chunks that were missed are stored, so that
        the next question finds them.
        """
        *_, answer = self.stream(question, chunks, session, **options)
        assert isinstance(answer, Answer)
        self.settle(options.get("cancel"))
        return answer

    def stream(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the `Answer`. See `AnswerOptions`; decoding is greedy unless one of
        them samples.

        Requests are admitted in the order in which they come; those of one session also wait for
        each other. `deadline_s` counts from the moment the first event is asked for. Raises
        `InputError`, `PromptTooLongError`, `QueueFullError`, `DeadlineError` and `CancelledError`;
        then everything the request held is released and its session is as it was.
        """
        request = self.intake.answer_request(question, chunks, options)
        with self._prefilled(request, session) as (active, turn, events):
            for event in self._events(active, events):
                yield turn.follow(event)

    def _events(self, active: ActiveRequest, events: AnswerEvents) -> Iterator[TokenEvent | Answer]:
        """The events of a prefilled request, as its caller gets them."""
        if active.request.on_prefill is not None:
            active.request.on_prefill(active.prefill)
        for event in events:
            # a complete answer is handed out even after the deadline
            if isinstance(event, TokenEvent):
                active.ticket.check()
            yield event

    def prefill(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[PrefillOptions],
    ) -> Prefill:
        """The prompt's KV and last logits (CacheBlend section 5.2). See `Prefill` for shapes.

        `session` gives the history; it gains no turn. Raises what `stream` raises.
        """
        request = self.intake.prefill_request(question, chunks, options)
        with self._prefilled(request, session, keep=False) as (active, _, _):
            return _own_prefill(active)

    def append(
        self,
        session: Session,
        question: str | Sequence[int],
        answer: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        **options: Unpack[PrefillOptions],
    ) -> Prefill:
        """Add a turn whose answer is given: it is computed and stored in one pass, like one that
        was decoded.

        Raises what `stream` raises.
        """
        request = self.intake.prefill_request(question, chunks, options, answer)
        with self._prefilled(request, session) as (active, turn, _):
            prefill = _own_prefill(active)
            notes = turn.end()
            return replace(
                prefill, reuse=replace(prefill.reuse, notes=(*prefill.reuse.notes, *notes))
            )

    @contextmanager
    def _prefilled(
        self, request: Request, session: Session | None, *, keep: bool = True
    ) -> Iterator[tuple[ActiveRequest, Turn, AnswerEvents]]:
        """What every request begins with: wait for the session, lay out the prompt, be admitted,
        prefill.

        Without `keep` the session is only read: no turn is added.
        """
        check_kind("session", session, Session, type(None))
        kept = session if keep else None
        if not request.max_new_tokens and not self._backend.makes_kv:
            raise UnsupportedError(
                "Another server computes this engine's answers, so it makes no KV of prompts."
            )
        self._backend.check(request)
        ticket = self.scheduler.ticket(request.deadline_s, request.cancel)
        with self.scheduler.request(), self._conversations.turn(kept, ticket) as turn:
            past = turn.past if session is None or keep else session.past
            session_id = session.session_id if session else ""
            prompt = self.intake.prompt(request, past)
            request = replace(request, max_new_tokens=prompt.answer_tokens)
            active = ActiveRequest(request, prompt, ticket, session_id, keep=turn.keeps)
            with active.held:
                hint = self._backend.prefetch_hint(active)
                tokens = len(prompt.token_ids)
                with self.scheduler.admitted(hint, ticket, tokens):
                    events = self._backend.begin(active)
                with closing(events):
                    turn.prefilled(prompt, active.prefill)
                    yield active, turn, events

    def chunk(
        self, content: str | Sequence[int], metadata: Mapping[str, Any] | None = None
    ) -> Chunk:
        """A chunk of text or token ids; its ids are fixed here: those of the text alone, wherever
        it stands.
        """
        return self.intake.chunk(content, metadata)

    def session(self, session_id: str, *, ttl_s: float | None = None) -> Session:
        """The conversation of that id, new or as it stands, also after a restart if the store has a
        directory.

        Idle for longer than `ttl_s` it is deleted; left out it stays as it was, or is the config's.
        Before its first turn a session is known, with its `ttl_s`, only as long as the caller holds
        it.
        """
        return self.conversations.session(session_id, ttl_s)

    def warm(
        self,
        chunks: Sequence[ChunkLike],
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
    ) -> WarmReport:
        """Compute and store the entries of `chunks` that are not stored; returns when they are
        durable.

        `on_progress(done, total)` is called after each chunk, `check` before each, and before each
        batch of chunks that are encoded together. A `QueueError` that it raises ends the work: the
        entries made so far are durable, and the report counts the chunks that are left.
        """
        return self.entries.warm(chunks, on_progress, check)

    def delete(self, chunks: Sequence[ChunkLike]) -> int:
        """Drop the entries of `chunks` from every tier. Returns how many of them were stored
        anywhere.
        """
        return self.entries.delete(chunks)

    def stats(self) -> EngineStats:
        """What the engine is and what its store holds."""
        adapter = self.model.adapter
        choice = self.model.dtype_choice
        return EngineStats(
            architecture=adapter.config.model_type,
            layers=adapter.layer_count,
            kv_bytes_per_token=adapter.kv_bytes_per_token,
            dtype=self.model.identity.dtype,
            dtype_why=choice.why,
            store=self.store.stats(),
            queue=self.scheduler.stats(),
            sessions=self._conversations.server_stats(),
        )

    def away(self) -> tuple[str, ...]:
        """What does not answer: kinds of remote tiers, and "conversations" for the server that has
        their state.
        """
        server = self._conversations.server_stats()
        sessions = () if server is None or server.answers else ("conversations",)
        return (*self.store.away(), *sessions)

    def settle(self, cancel: threading.Event | None = None) -> None:
        """Return when missed chunks are stored, when another request begins, or when `cancel` is
        set.
        """
        self._entries.background.settle(cancel)

    def flush(self) -> None:
        """Return when missed chunks are encoded and everything that waits is written."""
        self._entries.background.flush()
        self._conversations.flush()
        self.store.flush()

    def close(self) -> None:
        """Write what is computed and release the store. Calling it twice is harmless."""
        self._shut()

    def _check_open(self) -> None:
        if not self._shut.alive:
            raise RagKVError("The engine is closed; build a new one.")


def _own_prefill(active: ActiveRequest) -> Prefill:
    assert isinstance(active.prefill, Prefill)
    return active.prefill


def _shut(
    background: BackgroundEncoder,
    profiler: Profiler,
    scheduler: Scheduler,
    conversations: Conversations,
    store: Store,
    readers: Readers,
) -> None:
    """Stop the engine's threads, then close what they use. Holds no reference to the engine, so
    that it can go.
    """
    profiler.close()
    if background.close():
        scheduler.close()  # after the pass under way
        conversations.close()
        store.close()
        readers.close()
