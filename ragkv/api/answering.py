"""One answer on a worker's thread, for every endpoint that gives one: limits before, what happened as it happens, the
account after. An answer that nobody waits for any more is accounted for as far as it came.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from ragkv.engine import Engine
from ragkv.inference import Prefill
from ragkv.sessions import Session
from ragkv.types import Answer, Chunk, TokenEvent

from .errors import ApiError
from .keys import Principal
from .metrics import answered
from .settings import LimitsConfig
from .tenants import Tenant
from .work import Call

DEFAULT_MAX_TOKENS = 256


def max_tokens_of(asked: int | None, limits: LimitsConfig, param: str = "max_tokens") -> int:
    """How many tokens an answer may have; raises `ApiError` for more than the server gives."""
    if asked is None:
        return min(DEFAULT_MAX_TOKENS, limits.max_tokens)
    if asked > limits.max_tokens:
        raise ApiError(400, f"{param} is {asked}; this server gives {limits.max_tokens} at most.", param=param)
    return asked


def check_text(text: str, limits: LimitsConfig, param: str) -> None:
    """Raise `ApiError` for a question that is too long."""
    if len(text) > limits.question_chars:
        raise ApiError(
            400,
            f"{param} has {len(text)} characters; this server takes {limits.question_chars}.",
            code="context_length_exceeded",
            param=param,
        )


def check_count(count: int, limits: LimitsConfig, param: str) -> None:
    """Raise `ApiError` for more documents in one request than are taken."""
    if count > limits.documents:
        raise ApiError(400, f"{param} asks for {count}; this server takes {limits.documents} documents.", param=param)


@contextmanager
def session_of(tenant: Tenant, principal: Principal, session_id: str | None) -> Iterator[Session | None]:
    """The conversation of that id; raises `ApiError` where a new one would be one too many."""
    if session_id is None:
        yield None
        return
    with tenant.quotas.session(principal, session_id, tenant.session_ids):
        yield tenant.session(session_id)


def answering(
    call: Call,
    request: Request,
    engine: Engine,
    limits: LimitsConfig,
    question: str | Sequence[int],
    chunks: Sequence[Chunk],
    session: Session | None,
    **how: Any,
) -> Generator[Prefill | TokenEvent | Answer, None, None]:
    """The prompt once it is there, token events, the answer. `how` is what `Engine.stream` takes."""
    _check_prompt(engine, limits, question, chunks)
    seen: list[Prefill] = []
    tokens, over = 0, False
    events = engine.stream(
        question,
        chunks,
        session,
        deadline_s=call.remaining_s,
        cancel=call.left,
        on_prefill=seen.append,
        **how,
    )
    try:
        for event in events:
            if seen and not tokens:
                yield seen[0]
            if isinstance(event, Answer):
                over = True
                answered(request, event.timing, event.reuse, len(event.token_ids))
            tokens += 1
            yield event
    finally:
        events.close()  # type: ignore[attr-defined]
        if seen and not over:
            answered(request, seen[0].timing, seen[0].reuse, tokens)


def _check_prompt(engine: Engine, limits: LimitsConfig, question: str | Sequence[int], chunks: Sequence[Chunk]) -> None:
    if limits.prompt_tokens is None:
        return
    asked = engine.count_tokens(question) if isinstance(question, str) else len(question)
    if (tokens := asked + sum(map(len, chunks))) > limits.prompt_tokens:
        raise ApiError(
            400,
            f"The prompt has {tokens} tokens; this server takes {limits.prompt_tokens}. Give fewer documents.",
            code="context_length_exceeded",
        )


__all__ = ["DEFAULT_MAX_TOKENS", "answering", "check_count", "check_text", "max_tokens_of", "session_of"]
