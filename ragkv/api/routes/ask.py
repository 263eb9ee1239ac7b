"""/v1/ask and /v1/compare: a question over a collection, and what reuse gains on it."""

import uuid
from collections.abc import AsyncGenerator, Generator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragkv.engine import Engine
from ragkv.inference import Prefill
from ragkv.retrieval import Hit
from ragkv.sessions import Session
from ragkv.types import UNSET, Answer, Chunk, TokenEvent, Unset

from ..answering import answering, check_count, check_text, max_tokens_of, session_of
from ..errors import as_api_error, not_found, responses
from ..reports import citations_of, reuse_of, source_of, spans_of, timing_of
from ..schemas import AskRequest, AskResponse, CompareRequest, CompareResponse, Measured, Retrieval
from ..service import Here, Service, Who
from ..sse import EventStream, format_event
from ..tenants import Tenant
from ..work import Call, started

router = APIRouter(prefix="/v1", tags=["ask"])

Told = tuple[str, dict[str, Any]]  # the name of an event, and its data

_EVENTS = (
    "With `stream`: events `sources` {sources}, `prompt` {prompt, reuse, timing}, `token` {text} each, `answer` "
    "(the whole response) or `error` {error}."
)


@router.post(
    "/ask",
    summary="Ask a question over a collection",
    response_model=AskResponse,
    responses={
        **responses(404),
        200: {"description": _EVENTS, "content": {"text/event-stream": {}}},
    },
)
async def ask(body: AskRequest, request: Request, service: Here, who: Who) -> AskResponse | Response:
    """Passages are retrieved, their stored KV is fused, and the answer comes with sources, citations and a report."""
    _check(body, service)
    max_tokens_of(body.max_tokens, service.config.limits)

    def work(call: Call) -> Generator[Told | AskResponse, None, None]:
        with service.tenant(who) as tenant, session_of(tenant, who, body.session_id) as session:
            yield from _asked(call, request, service, tenant, session, body)

    if body.stream:
        return EventStream(_told(await started(request, service.answers.stream(work))))

    def whole(call: Call) -> AskResponse:
        *_, answer = work(call)
        assert isinstance(answer, AskResponse)
        return answer

    return await service.answers.run(request, whole)


@router.post("/compare", summary="Time a question's prompt both ways", responses=responses(404))
async def compare(body: CompareRequest, request: Request, service: Here, who: Who) -> CompareResponse:
    """The prompt of `/v1/ask` is made from stored KV, then in full, to the first token; no conversation is touched."""
    _check(body, service)

    def work(call: Call) -> CompareResponse:
        with service.tenant(who) as tenant:
            _, chunks = _retrieved(tenant, body)
            how = {"ratio": _ratio(body), "selector": body.selector}
            fused = _timed(call, request, tenant.engine, service, body.question, chunks, reuse="fused", **how)
            full = _timed(call, request, tenant.engine, service, body.question, chunks, reuse="none")
            return CompareResponse(fused=fused, full=full)

    return await service.answers.run(request, work)


def _asked(
    call: Call, request: Request, service: Service, tenant: Tenant, session: Session | None, body: AskRequest
) -> Generator[Told | AskResponse, None, None]:
    hits, chunks = _retrieved(tenant, body)
    sources = [source_of(number, hit) for number, hit in enumerate(hits, 1)]
    numbers = [source.number for source in sources]
    yield "sources", {"sources": [source.model_dump() for source in sources]}
    limits = service.config.limits
    events = answering(
        call,
        request,
        tenant.engine,
        limits,
        body.question,
        chunks,
        session,
        max_new_tokens=max_tokens_of(body.max_tokens, limits),
        ratio=_ratio(body),
        selector=body.selector,
        reuse=body.reuse,
    )
    for said in events:
        if isinstance(said, Prefill):
            yield "prompt", _report(said, numbers)
        elif isinstance(said, TokenEvent):
            if said.text:
                yield "token", {"text": said.text}
        else:
            tenant.collections.let_go_if_gone(body.collection, [source.text for source in sources])
            yield AskResponse(
                id=f"ask-{uuid.uuid4().hex}",
                answer=said.text,
                finish_reason=said.finish_reason,  # type: ignore[arg-type]
                citations=citations_of(said.text, sources),
                sources=sources,
                reuse=reuse_of(said.reuse),
                timing=timing_of(said.timing),
                prompt=spans_of(said.spans, numbers),
                session_id=body.session_id,
            )


async def _told(items: AsyncGenerator[Told | AskResponse, None]) -> AsyncGenerator[str, None]:
    try:
        async for item in items:
            if isinstance(item, AskResponse):
                yield format_event(item.model_dump(), "answer")
            else:
                yield format_event(item[1], item[0])
    except Exception as error:
        yield format_event(as_api_error(error).body, "error")
    finally:
        await items.aclose()


def _retrieved(tenant: Tenant, body: Retrieval, question: str | None = None) -> tuple[tuple[Hit, ...], list[Chunk]]:
    """The passages of a question, and the chunks they are."""
    with tenant.collections.lease(body.collection) as collection:
        if collection is None:
            raise not_found("collection", body.collection, "collection")
        rag = collection.rag
        hits = rag.retrieve(
            question or body.question,  # type: ignore[attr-defined]
            body.k,
            retriever=body.retriever,
            where=body.filter,
            order=body.order,
        )
        return hits, [rag.chunk(hit.passage) for hit in hits]


def _timed(
    call: Call, request: Request, engine: Engine, service: Service, question: str, chunks: list[Chunk], **how: Any
) -> Measured:
    *_, answer = answering(
        call, request, engine, service.config.limits, question, chunks, None, max_new_tokens=1, **how
    )
    assert isinstance(answer, Answer)
    return Measured(timing=timing_of(answer.timing), reuse=reuse_of(answer.reuse))


def _check(body: AskRequest | CompareRequest, service: Service) -> None:
    check_text(body.question, service.config.limits, "question")
    check_count(body.k, service.config.limits, "k")


def _ratio(body: AskRequest | CompareRequest) -> float | Unset | None:
    return body.ratio if "ratio" in body.model_fields_set else UNSET


def _report(prefill: Prefill, numbers: list[int]) -> dict[str, Any]:
    return {
        "prompt": [span.model_dump() for span in spans_of(prefill.spans, numbers)],
        "reuse": reuse_of(prefill.reuse).model_dump(),
        "timing": timing_of(prefill.timing).model_dump(),
    }


__all__ = ["router"]
