"""One answer in a worker thread, for every endpoint that gives one: limits first, then events, then the accounting.

A cancelled answer is accounted for up to its last token.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

from ragkv.engine import Engine
from ragkv.inference import AnswerOptions, Prefill
from ragkv.sessions import Session
from ragkv.types import Answer, Chunk, TokenEvent

from .errors import ApiError
from .keys import Principal
from .server_state import record_answer
from .settings import LimitsConfig
from .tenants import Tenant
from .worker_pool import WorkContext

DEFAULT_MAX_TOKENS = 256

AnswerEvents = Generator[Prefill | TokenEvent | Answer, None, None]


def checked_max_tokens(requested: int | None, limits: LimitsConfig, param: str = "max_tokens") -> int:
    """The most tokens an answer may have; raises `ApiError` above the server's limit."""
    if requested is None:
        return min(DEFAULT_MAX_TOKENS, limits.max_tokens)
    if requested > limits.max_tokens:
        raise ApiError(400, f"{param} is {requested}; this server gives {limits.max_tokens} at most.", param=param)
    return requested


def check_text(text: str, limits: LimitsConfig, param: str) -> None:
    """Raise `ApiError` for a question, query or message that is too long."""
    if len(text) > limits.question_chars:
        message = f"{param} has {len(text)} characters; this server accepts {limits.question_chars}."
        raise ApiError(400, message, "context_length_exceeded", param)


def check_count(count: int, limits: LimitsConfig, param: str) -> None:
    """Raise `ApiError` for too many documents in one request."""
    if count > limits.documents:
        message = f"{param} requests {count} documents; this server accepts {limits.documents}."
        raise ApiError(400, message, param=param)


@contextmanager
def session_of(tenant: Tenant, principal: Principal, session_id: str | None) -> Iterator[Session | None]:
    """The session of that id, new or stored; raises `ApiError` if a new one exceeds the quota."""
    if session_id is None:
        yield None
        return
    with tenant.quotas.session(principal, session_id, tenant.session_ids):
        yield tenant.session(session_id)


def stream_answer(
    context: WorkContext,
    engine: Engine,
    limits: LimitsConfig,
    question: str | Sequence[int],
    chunks: Sequence[Chunk],
    session: Session | None,
    **options: Unpack[AnswerOptions],
) -> AnswerEvents:
    """The prefill once it is done, token events, then the answer. The deadline and cancellation are the context's."""
    _check_prompt(engine, limits, question, chunks)
    prefills: list[Prefill] = []
    tokens, finished = 0, False
    options["deadline_s"], options["cancel"] = context.remaining_s, context.cancelled
    options["on_prefill"] = prefills.append
    events = engine.stream(question, chunks, session, **options)
    try:
        for event in events:
            if prefills and not tokens:
                yield prefills[0]
            if isinstance(event, Answer):
                finished = True
                record_answer(context.request, event.timing, event.reuse, len(event.token_ids))
            tokens += 1
            yield event
    finally:
        events.close()  # type: ignore[attr-defined]
        if prefills and not finished:
            record_answer(context.request, prefills[0].timing, prefills[0].reuse, tokens)


def _check_prompt(engine: Engine, limits: LimitsConfig, question: str | Sequence[int], chunks: Sequence[Chunk]) -> None:
    if limits.prompt_tokens is None:
        return
    question_tokens = engine.count_tokens(question) if isinstance(question, str) else len(question)
    if (tokens := question_tokens + sum(map(len, chunks))) > limits.prompt_tokens:
        raise ApiError(
            400,
            f"The prompt has {tokens} tokens; this server accepts {limits.prompt_tokens}. Give fewer documents.",
            "context_length_exceeded",
        )


__all__ = ["AnswerEvents", "check_count", "check_text", "checked_max_tokens", "session_of", "stream_answer"]
