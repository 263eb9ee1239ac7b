"""The engine: answers questions over chunks from stored KV. `Engine.stream` is the main path.

Validate and tokenize -> wait for the conversation's turn -> lay out the prompt -> find entries and
plan -> load and fuse, layer by layer -> decode -> store the turn's new KV in the background. The
engine holds no request's state: any number of threads may call it, and their passes over the model
run one after another.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from .assembly import BackendMaker, assembled
from .config import EngineConfig
from .conversations import Conversations, Session, Turn
from .entries import Entries, WarmReport
from .errors import RagKVError, UnsupportedError
from .model.loading import load
from .prompt import (
    AnswerOptions,
    ChunkLike,
    Prefill,
    PrefillOptions,
    Request,
    Serving,
    SharedModel,
    Task,
)
from .runtime import Check, Closing, limit_kernel_caches, no_check, openmp
from .runtime.arguments import check_kind
from .scheduling import QueueStats, Work
from .store import RemoteStats, Store, StoreStats
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

    `entries` and `conversations` are the doors to what is stored. The other attributes are for those
    who measure or serve: the `model` that engines share, the `intake` of requests, the `store`, the
    `scheduler`, the `fusor`, and the `controller` with its `profiler`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        config: EngineConfig | None = None,
        backend: BackendMaker | None = None,
        store: Store | None = None,
    ) -> None:
        """Build on a loaded transformers causal LM, on its device and in its dtype; it is put in
        eval mode.

        `with_config` passes a `SharedModel` instead. `backend` makes what computes the answers, if
        the model here does not. `store` is by default the one that the config describes; it is
        closed with the engine. Raises `UnsupportedModelError` for a model whose KV cannot be fused
        exactly.
        """
        check_kind("config", config, EngineConfig, type(None))
        self.config = config = config or EngineConfig()
        is_shared = isinstance(model, SharedModel)
        self.model = model if is_shared else SharedModel.of(model, tokenizer, config)
        parts = assembled(self.model, config, backend, store)
        self.intake = parts.intake
        self.store = parts.store
        self.scheduler = parts.scheduler
        self.fusor = parts.fusor
        self.controller = parts.controller
        self.profiler = parts.profiler
        self._conversations = parts.conversations
        self._entries = parts.entries
        self._backend = parts.backend
        # Also runs when the engine is garbage-collected or the process ends: no thread may be
        # inside the model then.
        self._shut = weakref.finalize(self, parts.close)
        # this thread loaded and packed weights; another one may compute next
        openmp.release_threads()

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        brief: bool = False,
    ) -> Self:
        """Build on a model folder, a GGUF file, a hub id or `"smollm2"`, on the config's device and
        dtype, with the config's LoRA adapter and kind of weights.

        The dtype "auto" is on a CPU the one in which it computes the model fastest
        (`model/dtype_choice.py`). `brief` is for a process that computes one answer at most:
        weights are not copied where that takes longer than the copies save in it.
        """
        from .model.dtype_choice import choose_dtype, copies_pay_at_once

        check_kind("name", name, str, os.PathLike)
        check_kind("config", config, EngineConfig, type(None))
        config = config or EngineConfig()
        limit_kernel_caches()  # before the first product, by which the dtype is chosen
        store_bytes = config.store.memory_bytes
        weights = config.weights
        choice = choose_dtype(
            name, config.device, config.dtype, store_bytes, config.packed_bytes, weights
        )
        if brief and not copies_pay_at_once(choice.name):
            config = replace(config, packed_bytes=0)
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
        the next question finds them, or when the deadline passes.
        """
        began = time.perf_counter()
        *_, answer = self.stream(question, chunks, session, **options)
        assert isinstance(answer, Answer)
        self.settle(options.get("cancel"), self.intake.left_s(options, began))
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
        with self._served(request, session) as (work, turn, serving):
            if request.on_prefill is not None:
                request.on_prefill(serving.prefill)
            for event in serving.events:
                if isinstance(event, TokenEvent):  # a complete answer is handed out even later
                    work.check()
                yield event if turn is None else turn.follow(event)

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
        with self._served(request, session, keep=False) as (_, _, serving):
            return _own_prefill(serving)

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
        with self._served(request, session) as (_, turn, serving):
            assert turn is not None
            prefill = _own_prefill(serving)
            notes = turn.end()
            return replace(
                prefill, reuse=replace(prefill.reuse, notes=(*prefill.reuse.notes, *notes))
            )

    @contextmanager
    def _served(
        self, request: Request, session: Session | None, *, keep: bool = True
    ) -> Iterator[tuple[Work, Turn | None, Serving]]:
        """What every request begins with: wait for the conversation, lay out the prompt, prefill.

        Without `keep` the session is only read: no turn is added.
        """
        check_kind("session", session, Session, type(None))
        if not request.max_new_tokens and not self._backend.makes_kv:
            raise UnsupportedError(
                "Another server computes this engine's answers, so it makes no KV of prompts."
            )
        self._backend.check(request)
        with ExitStack() as held:
            limits = (request.deadline_s, request.cancel, request.began)
            work = held.enter_context(self.scheduler.request(*limits))
            turn = None
            if session is not None:
                self._conversations.check_usable(session)
                if keep:
                    turn = held.enter_context(self._conversations.turn(session, work))
                else:
                    self._conversations.bring_up_to_date(session)
            past = (session.history, session.notes) if session else ()
            prompt = self.intake.prompt(request, *past)
            request = replace(request, max_new_tokens=prompt.answer_tokens)
            session_id = session.session_id if session else ""
            task = Task(request, prompt, work, session_id, keep=turn is not None)
            serving = held.enter_context(self._backend.serve(task))
            if turn is not None:
                turn.prefilled(task, serving.prefill)
            yield work, turn, serving

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

    def settle(self, cancel: threading.Event | None = None, timeout_s: float | None = None) -> None:
        """Return when missed chunks are stored, when another request begins, when `cancel` is set,
        or after `timeout_s`.
        """
        self._entries.background.settle(cancel, timeout_s)

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


def _own_prefill(serving: Serving) -> Prefill:
    assert isinstance(serving.prefill, Prefill)
    return serving.prefill
