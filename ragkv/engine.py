"""The engine: answers questions over chunks from stored KV. `Engine.stream` is the main path.

Validate and tokenize -> wait for the conversation's turn -> lay out the prompt -> find entries and
plan -> load and fuse, layer by layer -> decode -> store the turn's new KV in the background. The
engine holds no request's state: any number of threads may call it, and their passes over the model
run one after another.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Unpack

from .conversations import Session, Turn
from .engine_parts import EngineParts
from .errors import UnsupportedError
from .prompt import (
    AnswerOptions,
    ChunkLike,
    Prefill,
    PrefillOptions,
    Request,
    Serving,
    Task,
)
from .runtime.arguments import check_kind
from .scheduling import Work
from .types import Answer, Chunk, TokenEvent


class Engine(EngineParts):
    """One model, its store, and the path from question to answer.

    `entries` and `conversations` are the doors to what is stored. The other attributes are for those
    who measure or serve: the `model` that engines share, the `intake` of requests, the `store`, the
    `scheduler` with its `background_turns`, the `fusor`, and the `controller` with its `profiler`.
    """

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
            keeps = keep and session is not None
            if session is not None:
                self._conversations.check_usable(session)
                if keeps:
                    held.enter_context(session.held(work))
                else:
                    self._conversations.bring_up_to_date(session)
            past = (session.history, session.notes) if session else ()
            prompt = self.intake.prompt(request, *past)
            request = replace(request, max_new_tokens=prompt.answer_tokens)
            session_id = session.session_id if session else ""
            task = Task(request, prompt, work, session_id, keeps)
            serving = held.enter_context(self._backend.serve(task))
            turn = None
            if session is not None and keeps:
                turn = held.enter_context(self._conversations.turn(session, task, serving.prefill))
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


def _own_prefill(serving: Serving) -> Prefill:
    assert isinstance(serving.prefill, Prefill)
    return serving.prefill
