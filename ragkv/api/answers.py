"""One answer in a worker thread, for every endpoint that gives one: limits first, then events, then
the accounting.

A cancelled answer is accounted for up to its last token.
"""

import unicodedata
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Unpack

from ragkv.conversations import Session
from ragkv.engine import Engine
from ragkv.errors import DeadlineError
from ragkv.prompt import AnswerOptions, ServedPrompt
from ragkv.retrieval import Hit
from ragkv.runtime import Check
from ragkv.types import Answer, Chunk, TokenEvent

from .bodies.resources import RetrievalBody
from .limits import check_at_most
from .service import Caller, record_answer
from .settings import LimitsConfig
from .tenants import Tenant
from .work import WorkContext

DEFAULT_MAX_TOKENS = 256
# Seconds that the end of an answer waits until the turn of its conversation is on disk.
SAVE_S = 5.0
TITLE_CHARS = 80

AnswerEvents = Generator[ServedPrompt | TokenEvent | Answer, None, None]


@dataclass(frozen=True, slots=True)
class Found:
    """The passages for a question."""

    collection: str
    hits: Sequence[Hit] = ()
    chunks: Sequence[Chunk] = ()  # of the hits
    deletions: int = 0  # of the tenant's texts, before these were read

    def drop_deleted(self, tenant: Tenant) -> None:
        """Drop the KV of those that were deleted while the answer was made."""
        if self.hits:
            texts = [hit.passage.text for hit in self.hits]
            tenant.collections.drop_if_deleted(self.collection, texts, self.deletions)


def max_tokens_of(requested: int | None, limits: LimitsConfig) -> tuple[int, list[str]]:
    """The most tokens an answer may have, and a note if these are fewer than the request
    asks for.
    """
    most = min(requested or DEFAULT_MAX_TOKENS, limits.max_tokens)
    cut = requested is not None and most < requested
    return most, [
        f"max_tokens is {most}, not {requested}: limits.max_tokens of this server"
    ] if cut else []


def check_text(text: str, limits: LimitsConfig, param: str) -> None:
    """Raise `ApiError` for a question, query or message that is too long."""
    check_at_most(len(text), limits.question_chars, param, "characters", "context_length_exceeded")


def retrieve(
    tenant: Tenant,
    question: str,
    wanted: RetrievalBody,
    check: Check,
    param: str = "collection",
    before: str = "",
) -> Found:
    """The passages for a question. `param` is the request field that names the collection, `before`
    the question before in the conversation.
    """
    deletions = tenant.collections.deletions
    with (
        tenant.engine.scheduler.request(),
        tenant.collections.lease(wanted.collection, param) as rag,
    ):
        hits = rag.retrieve(
            question,
            wanted.k,
            retriever=wanted.retriever,
            where=wanted.filter,
            order=wanted.order,
            before=before,
            check=check,
        )
        chunks = [rag.chunk(hit.passage) for hit in hits]
        return Found(wanted.collection, hits, chunks, deletions)


def nothing_found(collection: str) -> str:
    """The note of an answer over a collection of which no passage matches."""
    return f"answered without documents: no passage of the collection {collection} matches"


@contextmanager
def conversation(
    caller: Caller, context: WorkContext, session_id: str | None, question: str
) -> Iterator[tuple[Tenant, Session | None]]:
    """The caller's tenant, and the session of that id, new or stored; raises `ApiError` if a new
    one exceeds the quota. What the answer left to be computed is, before the end of the block.

    `question` is the title of a conversation that has none yet; it is known as long as the caller
    holds the session.
    """
    with caller.service.tenants.lease(caller.principal) as tenant:
        session = None
        if session_id is not None:
            tenant.check_session_quota(caller.principal, session_id)
            session = tenant.session(session_id)
            session.first_title = title_from(question)
        yield tenant, session
        with suppress(DeadlineError):  # the answer is given already, and of a stream `[DONE]`
            tenant.engine.settle(context.cancelled, context.remaining_s)


def title_from(question: str) -> str:
    """The beginning of a question as one line of visible characters that do not change the
    direction of others.
    """
    visible = "".join(
        " " if unicodedata.category(char)[0] in "CZ" else char
        for char in question[: 8 * TITLE_CHARS]
    )
    line = " ".join(visible.split())
    return line if len(line) <= TITLE_CHARS else f"{line[: TITLE_CHARS - 1].rstrip()}…"


def stream_answer(
    context: WorkContext,
    engine: Engine,
    question: str | Sequence[int],
    chunks: Sequence[Chunk],
    session: Session | None,
    **options: Unpack[AnswerOptions],
) -> AnswerEvents:
    """The prefill once it is done, token events, then the answer. The deadline and cancellation are
    the context's.

    The answer comes when its turn is on disk, and the session is free by then.
    """
    prefills: list[ServedPrompt] = []
    answer: Answer | None = None
    tokens = 0
    options["deadline_s"], options["cancel"] = context.remaining_s, context.cancelled
    options["on_prefill"] = prefills.append
    events = engine.stream(question, chunks, session, **options)
    try:
        for event in events:
            if prefills and not tokens and answer is None:
                yield prefills[0]
            if isinstance(event, Answer):
                answer = event
            else:
                tokens += 1
                yield event
    finally:
        events.close()  # type: ignore[attr-defined]
        if prefills:
            tokens = tokens if answer is None else len(answer.token_ids)
            timing = prefills[0].timing if answer is None else answer.timing
            record_answer(context.request, timing, prefills[0].reuse, tokens)
    assert answer is not None  # every stream ends with one
    unsaved = None if session is None else session.wait_saved(SAVE_S)
    yield answer.with_notes(unsaved) if unsaved else answer
