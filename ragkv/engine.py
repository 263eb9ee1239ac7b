"""The engine: answers questions over chunks from stored KV. `Engine.stream` is the main path.

Validate and tokenize -> wait for the session's turn and to be admitted -> find entries and plan -> load and fuse, layer
by layer -> decode -> store the turn's new KV in the background. The engine holds no request's state: any number of
threads may call it, and their passes over the model run one after another.
"""

import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from .config import EngineConfig
from .conversations import DetachedTurn, Session, SessionInfo, Sessions, open_sessions
from .errors import CancelledError, InputError, RagKVError, UnsupportedError
from .fusion import ScoreModel, gate_result, learned
from .model.dtype_choice import choose_dtype
from .model.loading import READER, READER_NOTE, READER_UNKNOWN, load
from .prompt import (
    ActiveRequest,
    AnswerBackend,
    AnswerEvents,
    AnswerOptions,
    ChunkLike,
    EngineParts,
    ModelBackend,
    Prefill,
    PrefillOptions,
    Request,
    SharedModel,
    traced,
)
from .prompt.history import Discard
from .runtime import Check, Closing, iterate_in_thread, limit_kernel_caches, no_check, openmp, run_in_thread
from .scheduling import QueueStats
from .scheduling.encoding import Rescorer, RescoreReport, WarmReport
from .store import EntryKey, Identity, RemoteStats, StoreStats
from .types import Answer, Chunk, TokenEvent


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
    sessions: RemoteStats | None = None  # the server of shared conversations; None: they are not shared

    @property
    def remotes(self) -> dict[str, RemoteStats]:
        """The health of everything that replicas share: remote tiers by their kind, and "conversations"."""
        tiers = {tier.kind.value: tier.remote for tier in self.store.tiers if tier.remote is not None}
        return tiers if self.sessions is None else {**tiers, "conversations": self.sessions}


class Engine(Closing):
    """One model, its store, and the path from question to answer."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        config: EngineConfig | None = None,
        backend: Callable[[EngineParts], AnswerBackend] = ModelBackend,
    ) -> None:
        """Build on a loaded transformers causal LM, on its device and in its dtype; it is put in eval mode.

        `with_config` passes a `SharedModel` instead. `backend` makes what computes the answers. Raises
        `UnsupportedModelError` for a model whose KV cannot be fused exactly.
        """
        self.config = config = config or EngineConfig()
        shared = model if isinstance(model, SharedModel) else SharedModel.of(model, tokenizer, config)
        self.tokenizer = shared.tokenizer
        self.parts = EngineParts.build(shared, config)
        self._backend = backend(self.parts)
        self._sessions = open_sessions(self.parts, config)
        # Also runs when the engine is garbage-collected or the process ends: no thread may be inside the model then.
        self._shut = weakref.finalize(self, _shut, self.parts, self._sessions)
        openmp.release_threads()  # this thread loaded and packed weights; another one may compute next

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], config: EngineConfig | None = None) -> Self:
        """Build on a model folder, a hub id, or `"reader"`, the bundled one, on the config's device and dtype, with the
        config's LoRA adapter and kind of weights.

        The dtype "auto" is on a CPU the one in which it computes the model fastest (`model/dtype_choice.py`).
        """
        config = config or EngineConfig()
        limit_kernel_caches()  # before the first product, by which the dtype is chosen
        store_bytes, weights = config.store.memory_bytes, config.weights
        choice = choose_dtype(name, config.device, config.dtype, store_bytes, config.packed_bytes, weights)
        choice = choice.with_weights(config.weights)
        model, tokenizer = load(name, config.device, choice.name, config.adapter, config.weights, config.packed_bytes)
        return cls(SharedModel.of(model, tokenizer, config, choice), config=config)

    def with_config(self, config: EngineConfig, backend: Callable[[EngineParts], AnswerBackend] = ModelBackend) -> Self:
        """A second engine on the same loaded model: both compute one after another and decode together.

        It has its own store and sessions and is closed by itself: give it another directory or none. `device`, `dtype`,
        `weights`, `packed_bytes` and `scheduler.batch_rows` stay those of the first engine, whatever `config` says.
        """
        self._check_open()
        return type(self)(self.parts.shared, config=config, backend=backend)

    def answer(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Answer:
        """The answer to `question` over `chunks`. Takes the options of `stream` and raises what it raises."""
        *_, answer = self.stream(question, chunks, session, **options)
        assert isinstance(answer, Answer)
        return answer

    def stream(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the `Answer`. See `AnswerOptions`; decoding is greedy unless one of them samples.

        Requests are admitted in the order in which they come; those of one session also wait for each other.
        `deadline_s` counts from the moment the first event is asked for. Raises `InputError`, `PromptTooLongError`,
        `QueueFullError`, `DeadlineError` and `CancelledError`; then everything the request held is released and its
        session is as it was.
        """
        request = self.parts.intake.answer_request(question, chunks, options)
        with self._prefilled(request, session) as (active, turn, events):
            for _, event in self._events(active, events):
                turn.follow(event)
                yield event

    async def aanswer(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Answer:
        """`answer` for a task. If the task is cancelled, so is the request."""

        def run(cancel: threading.Event) -> Answer:
            options["cancel"] = cancel
            return self.answer(question, chunks, session, **options)

        return await run_in_thread(run, options.get("cancel"))

    async def astream(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> AsyncGenerator[TokenEvent | Answer, None]:
        """`stream` for a task: one thread runs the whole request, and the event loop never waits for the model.

        Closing the generator, or cancelling the task that waits for it, cancels the request. A loop that is left early
        closes it by `contextlib.aclosing`.
        """

        def run(cancel: threading.Event) -> Generator[TokenEvent | Answer]:
            options["cancel"] = cancel
            yield from self.stream(question, chunks, session, **options)

        async with aclosing(iterate_in_thread(run, options.get("cancel"))) as events:
            async for event in events:
                yield event

    def stream_choices(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        choices: int = 1,
        **options: Unpack[AnswerOptions],
    ) -> Iterator[tuple[int, TokenEvent | Answer]]:
        """Several answers to one prompt: it is prefilled once, and they decode together.

        Each event comes with the index of its answer. `session` gives the history; it gains a turn from one answer, and
        none from several. The answer `i` samples with `seed + i`. Raises what `stream` raises.
        """
        if choices < 1:
            raise InputError(f"choices is {choices}; it must be at least 1.")
        request = replace(self.parts.intake.answer_request(question, chunks, options), choices=choices)
        with self._prefilled(request, session, keep=choices == 1) as (active, turn, events):
            for index, event in self._events(active, events):
                turn.follow(event)
                yield index, event

    def _events(self, active: ActiveRequest, events: AnswerEvents) -> Iterator[tuple[int, TokenEvent | Answer]]:
        """The events of a prefilled request, as its caller gets them."""
        if active.request.on_prefill is not None:
            active.request.on_prefill(active.prefill)
        for index, event in events:
            if isinstance(event, TokenEvent):  # a complete answer is handed out even after the deadline
                active.ticket.check()
                yield index, event
                continue
            active.answers.append(event)
            if self.is_reader and event.text.strip() == READER_UNKNOWN:
                event = event.with_notes(READER_NOTE)
            yield index, event

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
        request = self.parts.intake.prefill_request(question, chunks, options)
        with self._prefilled(request, session, keep=False) as (active, _, _):
            return _own_prefill(active)

    async def aprefill(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **options: Unpack[PrefillOptions],
    ) -> Prefill:
        """`prefill` for a task. If the task is cancelled, so is the request."""

        def run(cancel: threading.Event) -> Prefill:
            options["cancel"] = cancel
            return self.prefill(question, chunks, session, **options)

        return await run_in_thread(run, options.get("cancel"))

    def append(
        self,
        session: Session,
        question: str | Sequence[int],
        answer: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        **options: Unpack[PrefillOptions],
    ) -> Prefill:
        """Add a turn whose answer is given: it is computed and stored in one pass, like one that was decoded.

        Raises what `stream` raises.
        """
        request = self.parts.intake.prefill_request(question, chunks, options, answer)
        with self._prefilled(request, session) as (active, turn, _):
            turn.end()
            return _own_prefill(active)

    @contextmanager
    def _prefilled(
        self, request: Request, session: Session | None, *, keep: bool = True
    ) -> Iterator[tuple[ActiveRequest, DetachedTurn, AnswerEvents]]:
        """What every request begins with: wait for the session, lay out the prompt, be admitted, prefill.

        Without `keep` the session is only read: no turn is added.
        """
        parts, kept = self.parts, session if keep else None
        if not request.max_new_tokens and not self._backend.makes_kv:
            raise UnsupportedError("Another server computes this engine's answers, so it makes no KV of prompts.")
        self._backend.check(request)
        ticket = parts.scheduler.ticket(request.deadline_s, request.cancel)
        with traced(request) as trace, parts.scheduler.request(), self._sessions.turn(kept, ticket) as turn:
            past = turn.past if session is None or keep else session.past
            session_id = session.session_id if session else ""
            prompt = parts.intake.prompt(request, past)
            trace.active = active = ActiveRequest(request, prompt, ticket, session_id, keep=turn.keeps)
            with active.held:
                with parts.scheduler.admitted(self._backend.prefetch_hint(active), ticket):
                    events = self._backend.begin(active)
                with closing(events):
                    turn.prefilled(prompt, active.prefill)
                    yield active, turn, events

    def chunk(self, content: str | Sequence[int], metadata: Mapping[str, Any] | None = None) -> Chunk:
        """A chunk of text or token ids; its ids are fixed here. Text gets the config's `chunk_end` appended."""
        return self.parts.intake.chunk(content, metadata)

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` has, without special tokens."""
        return len(self.parts.intake.encode(text))

    @property
    def context_tokens(self) -> int | None:
        """The most tokens of a prompt and its answer; `None`: no limit is known."""
        return self.parts.adapter.context_length

    @property
    def preferred_order(self) -> str | None:
        """The order of retrieved passages that the applied gate result names; `None`: none was applied."""
        return self.parts.intake.preferred_order

    @property
    def is_reader(self) -> bool:
        """Whether the model is the bundled one, by whatever name it was loaded."""
        return str(getattr(self.tokenizer, "name_or_path", "")) == str(READER)

    @property
    def tokenizer_id(self) -> str:
        """Digest of the tokenizer: text splits the same under the same id."""
        return self.parts.identity.tokenizer

    def session(self, session_id: str, *, ttl_s: float | None = None, discard: str | Discard | None = None) -> Session:
        """The conversation of that id, new or as it stands, also after a restart if the store has a directory.

        Idle for longer than `ttl_s` it is deleted; `discard` says which tokens go when it outgrows the context (see
        `prompt/history/truncation.py`). An option that is left out stays as it was, or is the config's. Before its
        first turn a session is known, with its options, only as long as the caller holds it.
        """
        self._check_open()
        return self._sessions.session(session_id, ttl_s, discard)

    def unsaved_session(self, session_id: str, past: Session | None = None, notes: Sequence[str] = ()) -> Session:
        """A conversation that is saved nowhere until it is forked, with the past of another one or with none.

        `session_id` is the group of its blocks; `notes` are for the report of its first turn.
        """
        self._check_open()
        return self._sessions.unsaved.new(session_id, past, tuple(notes))

    def sessions(self, session_ids: Iterable[str] | None = None) -> tuple[SessionInfo, ...]:
        """The conversations that have turns, the last used first; with `session_ids`, of these only."""
        return self._sessions.list(session_ids)

    def has_session(self, session_id: str) -> bool:
        """Whether there is a conversation of that id that has turns: quick."""
        return self._sessions.has(session_id)

    def session_ids(self) -> tuple[str, ...]:
        """The ids of the conversations that have turns, without looking anything up: quick."""
        return self._sessions.ids()

    def session_uses(self) -> dict[str, float]:
        """When each conversation was used last (seconds since the epoch), by its id, the last used first: quick."""
        return self._sessions.uses()

    def delete_session(self, session_id: str) -> None:
        """Delete a conversation: its manifest, and its blocks in every tier where no other session has them."""
        self.session(session_id).delete()

    def delete_sessions(self, session_ids: Iterable[str]) -> None:
        """Delete conversations of which no turn is under way, as `delete_session` does."""
        self._check_open()
        self._sessions.delete_all(session_ids)

    def warm(
        self,
        chunks: Sequence[ChunkLike],
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
    ) -> WarmReport:
        """Compute and store the entries of `chunks` that are not stored; returns when they are durable.

        `on_progress(done, total)` is called after each chunk, `check` before each, and before each batch of chunks that
        are encoded together. A `QueueError` that it raises ends the work: the entries made so far are durable, and the
        report counts the chunks that are left.
        """
        checked = self.parts.intake.chunks(chunks)
        self.parts.intake.check_encodable(checked)
        return self.parts.warmer.warm(list(dict.fromkeys(chunk.token_ids for chunk in checked)), on_progress, check)

    async def awarm(
        self, chunks: Sequence[ChunkLike], on_progress: Callable[[int, int], None] | None = None
    ) -> WarmReport:
        """`warm` for a task. If the task is cancelled, the work ends before the next batch; what was made is durable.

        `on_progress` is called on the thread that does the work.
        """

        def run(cancel: threading.Event) -> WarmReport:
            def check() -> None:
                if cancel.is_set():
                    raise CancelledError("The task was cancelled.")

            return self.warm(chunks, on_progress, check)

        return await run_in_thread(run)

    def rescore(
        self,
        network: ScoreModel,
        chunks: Sequence[ChunkLike] = (),
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
    ) -> RescoreReport:
        """Score every stored chunk with `network`, from its KV, and use these scores from then on.

        Meanwhile requests are answered with the old scores. `chunks`, those of documents in order, come first. With a
        store directory the network is saved there at the end, and later engines use it. `on_progress(done, total)` is
        called after each batch of chunks, `check` before; a `QueueError` that it raises ends the work, the old scores
        stay in use, and the next call goes on. Raises `StoreReadOnlyError`, and `InputError` if
        `fusion.learned_scores` is off.
        """
        self._check_open()
        parts, directory, old = self.parts, self.config.store.directory, self.parts.encoder.scorer
        if old is None or not self.config.fusion.learned_scores:
            raise InputError(
                "Learned scores are switched off: set fusion.learned_scores and fusion.sensitivity_prefixes."
            )
        checked = parts.intake.chunks(chunks)
        scorer = old.with_network(network)
        rescorer = Rescorer(parts.encoder, parts.store, parts.scheduler)
        report = rescorer.rescore(scorer, [chunk.token_ids for chunk in checked], on_progress, check)
        if report.is_complete and directory is not None and scorer.learned is not None:
            learned.save(scorer.learned, directory)
            parts.intake.apply_gate_result(gate_result.load(directory, parts.encoder.measured_as, self.config.fusion))
        return report

    def warm_soon(self, chunks: Sequence[ChunkLike]) -> None:
        """Compute and store the entries of `chunks` that are not stored, in the background, between requests."""
        checked = self.parts.intake.chunks(chunks)
        self.parts.intake.check_encodable(checked)
        for chunk in checked:
            self.parts.background.add(chunk.token_ids)

    def delete(self, chunks: Sequence[ChunkLike]) -> int:
        """Drop the entries of `chunks` from every tier. Returns how many of them were stored anywhere."""
        self._check_open()
        parts, checked = self.parts, self.parts.intake.chunks(chunks)
        keys = [parts.encoder.identity.key(chunk.token_ids) for chunk in checked]
        for chunk in checked:
            parts.background.forget(chunk.token_ids)
        with self._sessions.telling(keys):
            return sum(parts.store.delete(key) for key in keys)

    def keys(self, chunks: Sequence[ChunkLike]) -> list[EntryKey]:
        """The keys of the entries of `chunks`, whether they are stored or not."""
        return [self.parts.encoder.identity.key(chunk.token_ids) for chunk in self.parts.intake.chunks(chunks)]

    def drop(self, keys: Sequence[EntryKey], stop: Callable[[], bool] = lambda: False) -> bool:
        """Drop entries that another engine was asked to delete; `False` if `stop` ended this.

        While a remote tier does not answer they are dropped from the tiers of this machine alone. No one is told.
        """
        self._check_open()
        store = self.parts.store
        self.parts.background.forget_keys(keys)
        for key in keys:
            if stop():
                return False
            (store.delete_here if store.away() else store.delete)(key)
        return True

    def retain(self, chunks: Sequence[ChunkLike]) -> int:
        """Drop this model's and application's entries of all other chunks. Returns how many were dropped."""
        stale = self._others(chunks)
        with self._sessions.telling(stale):
            return sum(self.parts.store.delete(key) for key in stale)

    def _others(self, chunks: Sequence[ChunkLike]) -> list[EntryKey]:
        """The keys of this model's and application's entries of all other chunks."""
        self.flush()
        identity = self.parts.encoder.identity
        retained = {identity.key(chunk.token_ids) for chunk in self.parts.intake.chunks(chunks)}
        own = (info.key for info in self.parts.store.infos() if info.identity == identity)
        return [key for key in own if key not in retained]

    def gc(self) -> int:
        """Drop the entries of other models, dtypes, adapters and tokenizers, of any tenant, and scores not in use.

        Returns the bytes freed.
        """
        return self.parts.store.gc(self._is_own)

    def count_stale(self, chunks: Sequence[ChunkLike]) -> tuple[int, int]:
        """How many entries `gc()` and `retain(chunks)` would drop. Changes nothing."""
        refused = {key.kv for key in self.parts.store.refused(self._is_own)}  # scores go with their entry
        return len(refused), len(self._others(chunks))

    def _is_own(self, identity: Identity) -> bool:
        """Whether entries of `identity` are of this model, dtype, adapter and tokenizer."""
        encoder = self.parts.encoder
        own, used = encoder.identity, "" if encoder.scorer is None else encoder.scorer.name
        return identity.scorer in ("", used) and replace(identity.of_kv, context=own.context, tenant=own.tenant) == own

    def stats(self) -> EngineStats:
        """What the engine is and what its store holds."""
        adapter = self.parts.adapter
        return EngineStats(
            architecture=adapter.config.model_type,
            layers=adapter.layer_count,
            kv_bytes_per_token=adapter.kv_bytes_per_token,
            dtype=self.parts.identity.dtype,
            dtype_why=self.parts.shared.dtype_choice.why,
            store=self.parts.store.stats(),
            queue=self.parts.scheduler.stats(),
            sessions=self._sessions.server_stats(),
        )

    def away(self) -> tuple[str, ...]:
        """What does not answer: kinds of remote tiers, and "conversations" for the server that has their state."""
        server = self._sessions.server_stats()
        sessions = () if server is None or server.answers else ("conversations",)
        return (*self.parts.store.away(), *sessions)

    def flush(self) -> None:
        """Return when missed chunks are encoded and everything that waits is written."""
        self.parts.background.flush()
        self._sessions.flush()
        self.parts.store.flush()

    def close(self) -> None:
        """Write what is computed and release the store. Calling it twice is harmless."""
        self._shut()

    def _check_open(self) -> None:
        if not self._shut.alive:
            raise RagKVError("The engine is closed; build a new one.")


def _own_prefill(active: ActiveRequest) -> Prefill:
    assert isinstance(active.prefill, Prefill)
    return active.prefill


def _shut(parts: EngineParts, sessions: Sessions) -> None:
    """Stop the engine's threads, then close what they use. Holds no reference to the engine, so that it can go."""
    if parts.background.close():
        parts.scheduler.close()  # after the pass under way
        sessions.close()
        parts.store.close()
        parts.readers.close()


__all__ = ["Engine", "EngineStats"]
