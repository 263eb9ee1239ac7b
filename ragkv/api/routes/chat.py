"""/v1/chat/completions: OpenAI's endpoint, with documents."""

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..bodies.chat import ChatRequest
from ..bodies.chat_answer import ChatResponse, Piece
from ..chat_completion import ChatCompletion
from ..service import PrincipalDep, ServiceDep
from ..sse import DONE, Stream, format_event

router = APIRouter(prefix="/v1", tags=["openai"])

_STREAM = "With `stream`: chat.completion.chunk objects, then `[DONE]`; the last chunk has `ragkv`."


@router.post(
    "/chat/completions",
    summary="Answer a chat",
    response_model=ChatResponse,
    responses={200: {"description": _STREAM, "content": {"text/event-stream": {}}}},
)
async def chat(
    body: ChatRequest, request: Request, service: ServiceDep, principal: PrincipalDep
) -> ChatResponse | Response:
    """OpenAI's endpoint. `documents` come with the request, or `rag` finds them; the answer cites
    them as [n].
    """
    completion = ChatCompletion(service, principal, body)
    completion.check()
    if body.stream:
        return _streamed(completion, await service.answer_pool.stream(request, completion.events))
    return await service.answer_pool.run_stream(request, completion.events, ChatResponse)


def _streamed(
    completion: ChatCompletion, items: AsyncGenerator[Piece | ChatResponse, None]
) -> Stream:
    options = completion.body.stream_options
    with_usage = options is not None and options.include_usage

    def show(item: Piece | ChatResponse) -> Iterator[str]:
        if not isinstance(item, Piece):
            yield from map(format_event, _last_chunks(completion, item, with_usage))
            return
        chunk = _chunk(completion, with_usage, {"content": item.text})
        if item.logprobs:
            chunk["choices"][0]["logprobs"] = {"content": item.logprobs, "refusal": None}
        yield format_event(chunk)

    first = format_event(_chunk(completion, with_usage, {"role": "assistant", "content": ""}))
    return Stream(items, show, lambda error: format_event(error.body), first, DONE)


def _last_chunks(
    completion: ChatCompletion, response: ChatResponse, with_usage: bool
) -> list[dict[str, Any]]:
    """The chunks that end the answer and, if requested, the chunk with the usage. The last of them
    has the report.
    """
    choice = response.choices[0]
    chunks = [
        _chunk(completion, with_usage, {"tool_calls": [{"index": number, **call.model_dump()}]})
        for number, call in enumerate(choice.message.tool_calls or ())
    ]
    annotations = [one.model_dump() for one in choice.message.annotations]
    delta = {"annotations": annotations} if annotations else {}
    chunks.append(_chunk(completion, with_usage, delta, choice.finish_reason))
    if with_usage:
        chunks.append(
            {**_chunk(completion, True, {}), "choices": [], "usage": response.usage.model_dump()}
        )
    chunks[-1]["ragkv"] = response.ragkv.model_dump()
    return chunks


def _chunk(
    completion: ChatCompletion,
    with_usage: bool,
    delta: dict[str, Any],
    finish_reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": completion.id,
        "object": "chat.completion.chunk",
        "created": completion.created,
        "model": completion.body.model,
        "choices": [choice],
        **({"usage": None} if with_usage else {}),
    }
