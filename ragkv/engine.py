"""The engine: answers questions over chunks from stored KV.

`Engine.events` is the main path; `answer` and `stream` are its two forms.

A request is validated and tokenized. It waits for its conversation's previous turn, and its prompt
is laid out. Entries are found, and a plan is made. The entries are loaded and fused, layer by
layer. Then the answer is decoded, and the turn's new KV is stored in the background.

The engine holds no request's state. Any number of threads may call it. Their passes over the model
run one after another.
"""

import os
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, Self, Unpack

from .assembly import BackendMaker, assembled
from .config import EngineConfig
from .control import Method
from .engine_stats import EngineStats
from .entries import Entries
from .errors import RagKVError
from .prompt import (
    AnswerEvents,
    AnswerOptions,
    PieceLike,
    PrefilledPrompt,
    PrefillOptions,
    PromptReport,
    Request,
    SharedModel,
    StartedAnswer,
    Task,
)
from .runtime import Claim, Closing, close_dropped, openmp
from .runtime.outside import check_kind
from .sessions import Session, Sessions, Turn
from .store.store import Store
from .types import Answer, Chunk, TokenEvent


class Engine(Closing):
    """One model, its store, and the path from question to answer.

    `entries` and `sessions` are the doors to what is stored. Engines may share the `model`. `parts`
    is what packages above may use.
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
        if not isinstance(model, SharedModel):
            model = SharedModel.of(model, tokenizer, config)
        self.model = model
        self.parts = assembled(model, config, backend, store)
        # Runs when the engine is garbage-collected or the process ends: no thread may be inside the
        # model then.
        self._unclosed = weakref.finalize(self, close_dropped, "An engine", self.parts.close)
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

        `brief` is for a process that computes one answer at most: it copies no weights where making
        the copies takes longer than they save in one answer.
        """
        check_kind("config", config, EngineConfig, type(None))
        config = config or EngineConfig()
        return cls(SharedModel.from_pretrained(name, config, brief=brief), config=config)

    def answer(
        self,
        question: str | Sequence[int],
        chunks: Sequence[PieceLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Answer:
        """The answer to `question` over `chunks`. Takes the options of `stream` and raises what it
        raises.

        Before it returns, it waits until the missed chunks are stored, so that the next process
        finds them, too. It waits no longer than until another request comes or the deadline
        passes. To measure the time of an answer, use `stream`.
        """
        return self.answer_to(self.request(question, chunks, **options), session)

    def stream(
        self,
        question: str | Sequence[int],
        chunks: Sequence[PieceLike] = (),
        session: Session | None = None,
        **options: Unpack[AnswerOptions],
    ) -> AnswerEvents:
        """Token events, then the `Answer`. See `AnswerOptions`; decoding is greedy unless one of
        them samples. Close a stream that is not read to its end.

        Requests are admitted in order. Short prompts share passes, and tenants take turns. Requests
        of one session wait for each other. `deadline_s` counts from the moment the first event is
        asked for. Raises `InputError`, `PromptTooLongError`, `QueueFullError`, `DeadlineError` and
        `CancelledError`; then everything the request held is released and its session is as it was.
        """
        request = self.request(question, chunks, **options)
        with closing(self.events(request, session)) as events:
            for event in events:
                if not isinstance(event, PromptReport):
                    yield event

    def request(
        self,
        question: str | Sequence[int],
        chunks: Sequence[PieceLike] = (),
        **options: Unpack[AnswerOptions],
    ) -> Request:
        """A checked request, whose `claim` begins now. `stream` and `answer` make one themselves.

        Make one where its claim must end earlier work, too, such as the search for its chunks,
        which replace those that it has. Raises `InputError`.
        """
        return self.parts.intake.answer_request(question, chunks, options)

    def answer_to(self, request: Request, session: Session | None = None) -> Answer:
        """What `answer` returns, for a request that was made before."""
        answer = None
        for event in self.events(request, session):  # the report, which has the KV, is not kept
            if isinstance(event, Answer):
                answer = event
        assert answer is not None  # every answer ends with one
        if answer.reuse.missed_chunks:
            self.settle(request.claim)
        return answer

    def events(
        self, request: Request, session: Session | None = None
    ) -> Generator[PromptReport | TokenEvent | Answer, None, None]:
        """The report of the prompt once it is computed, then what `stream` yields, for a request
        that was made before.
        """
        with self._started(request, session) as (turn, started):
            yield started.report
            for event in started.events:
                if isinstance(event, TokenEvent):  # a complete answer is handed out even later
                    request.claim.check()
                yield event if turn is None else turn.follow(event)

    def prefill(
        self,
        question: str | Sequence[int],
        chunks: Sequence[PieceLike] = (),
        session: Session | None = None,
        **options: Unpack[PrefillOptions],
    ) -> PrefilledPrompt:
        """The prompt's KV and last logits (CacheBlend section 5.2); `PrefilledPrompt` has shapes.

        `session` gives the history; it gains no turn. Raises what `stream` raises.
        """
        request = self.parts.intake.prefill_request(question, chunks, options)
        with self._started(request, session, adds_turn=False) as (_, started):
            return started.prefill

    def append(
        self,
        session: Session,
        question: str | Sequence[int],
        answer: str | Sequence[int],
        chunks: Sequence[PieceLike] = (),
        **options: Unpack[PrefillOptions],
    ) -> PrefilledPrompt:
        """Add a turn whose answer is given: it is computed and stored in one pass, like one that
        was decoded.

        Raises what `stream` raises.
        """
        check_kind("session", session, Session)
        request = self.parts.intake.prefill_request(question, chunks, options, answer)
        with self._started(request, session) as (turn, started):
            prefill = started.prefill
            assert turn is not None
            notes = turn.end()
            return replace(
                prefill, reuse=replace(prefill.reuse, notes=(*prefill.reuse.notes, *notes))
            )

    @contextmanager
    def _started(
        self, request: Request, session: Session | None, *, adds_turn: bool = True
    ) -> Iterator[tuple[Turn | None, StartedAnswer]]:
        """Begin a request: wait for its conversation, lay out the prompt, compute it.

        Without `adds_turn` the session is only read: no turn is added.
        """
        check_kind("session", session, Session, type(None))
        self.parts.backend.refuse_unsupported(request)
        with ExitStack() as held:
            held.enter_context(self.parts.scheduler.request())
            adds_turn = adds_turn and session is not None
            if session is not None:
                self.sessions.check_usable(session)
                if adds_turn:
                    held.enter_context(session.held(request.claim.check))
                else:
                    session.bring_up_to_date()
            past = (session.history, session.notes) if session else ()
            prompt = self.parts.intake.prompt(request, *past)
            task = Task(request, prompt, session.session_id if session else "", adds_turn)
            started = held.enter_context(self.parts.backend.started(task))
            turn = None
            if session is not None and adds_turn:
                turn = held.enter_context(self.sessions.turn(session, task, started.report))
            yield turn, started

    def chunk(
        self, content: str | Sequence[int], metadata: Mapping[str, Any] | None = None
    ) -> Chunk:
        """A chunk of text or token ids; its ids are fixed here: those of the text alone, wherever
        it stands.
        """
        return self.parts.intake.chunk(content, metadata)

    def session(self, session_id: str, *, ttl_s: float | None = None) -> Session:
        """The conversation of that id, new or as it stands, also after a restart if the store has a
        directory.

        Idle for longer than `ttl_s` it is deleted; left out it stays as it was, or is the config's.
        Before its first turn a session is known, with its `ttl_s`, only as long as the caller holds
        it.
        """
        return self.sessions.open(session_id, ttl_s)

    def with_config(self, config: EngineConfig, backend: BackendMaker | None = None) -> Self:
        """A second engine on the same loaded model: both compute one after another and decode
        together.

        It has its own store and sessions and is closed by itself: give it another directory or
        none. `device`, `dtype`, `weights` and `packed_bytes` stay those of the first engine,
        whatever `config` says.
        """
        self._check_open()
        return type(self)(self.model, config=config, backend=backend)

    def token_ids(self, text_or_ids: str | Sequence[int]) -> tuple[int, ...]:
        """Text as ids, without special tokens; ids as they are."""
        return self.parts.intake.token_ids(text_or_ids)

    def method(self, options: Mapping[str, Any] | None = None) -> Method:
        """How a request with such options has its prompt computed; the default's without any."""
        return self.parts.controller.methods.of(options or {})

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self.model.tokenizer

    @property
    def entries(self) -> Entries:
        """The stored entries of chunks: compute them before they are asked for, delete them. Raises
        `RagKVError` once closed.
        """
        self._check_open()
        return self.parts.entries

    @property
    def sessions(self) -> Sessions:
        """All sessions: list, open, delete. Raises `RagKVError` once closed."""
        self._check_open()
        return self.parts.sessions

    def stats(self) -> EngineStats:
        """What the engine is and what its store holds."""
        return EngineStats.of(self.model, self.parts)

    def settle(self, claim: Claim) -> None:
        """Return when missed chunks are stored, when another request begins, or when `claim` is
        over.
        """
        self.parts.entries.background.settle(claim)

    def flush(self) -> None:
        """Return when missed chunks are encoded and everything that waits is written."""
        self.parts.entries.background.flush()
        self.parts.sessions.flush()
        self.parts.store.flush()

    def close(self) -> None:
        """Write what is computed and release the store. Calling it twice is harmless."""
        if self._unclosed.detach() is not None:
            self.parts.close()

    def _check_open(self) -> None:
        if not self._unclosed.alive:
            raise RagKVError("The engine is closed; build a new one.")
