"""/v1/completions: OpenAI's older endpoint, which continues plain texts."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..bodies.values import Piece
from ..errors import responses
from ..openai_completions import CompletionLogprobs, CompletionRequest, CompletionResponse
from ..service import PrincipalDep, ServiceDep
from ..sse import EventStream, openai_events
from ..text_completion import TextCompletion

router = APIRouter(prefix="/v1", tags=["openai"])

_STREAM = "With `stream`: text_completion objects, then `[DONE]`; the last has `ragkv`."


@router.post(
    "/completions",
    summary="Continue texts",
    response_model=CompletionResponse,
    responses={**responses(404), 200: {"description": _STREAM, "content": {"text/event-stream": {}}}},
)
async def complete(
    body: CompletionRequest, request: Request, service: ServiceDep, principal: PrincipalDep
) -> CompletionResponse | Response:
    """Continue one text or several, as they are: no chat template, no session. Known passages in them are reused."""
    completion = TextCompletion(service, principal, body)
    completion.check()
    if body.stream:
        return EventStream(_chunks(completion, await service.answer_pool.stream(request, completion.events)))
    return await service.answer_pool.run_stream(request, completion.events, CompletionResponse)


def _chunks(
    completion: TextCompletion, items: AsyncGenerator[Piece | CompletionResponse, None]
) -> AsyncGenerator[str, None]:
    def chunks(item: Piece | CompletionResponse) -> list[dict[str, Any]]:
        if not isinstance(item, Piece):
            return _last_chunks(completion, item)
        entries = [dict(entry) for entry in item.logprobs]
        logprobs = CompletionLogprobs.of(entries).model_dump() if entries else None
        return [_chunk(completion, item.index, item.text, logprobs)]

    return openai_events(items, chunks)


def _last_chunks(completion: TextCompletion, response: CompletionResponse) -> list[dict[str, Any]]:
    """The chunks that end the continuations and, if requested, the usage. The last of them has the report."""
    chunks = [_chunk(completion, one.index, "", None, one.finish_reason) for one in response.choices]
    options = completion.body.stream_options
    if options is not None and options.include_usage:
        chunks.append({**_chunk(completion, 0, "", None), "choices": [], "usage": response.usage.model_dump()})
    chunks[-1]["ragkv"] = response.ragkv.model_dump()
    return chunks


def _chunk(
    completion: TextCompletion, index: int, text: str, logprobs: Any, finish_reason: str | None = None
) -> dict[str, Any]:
    return {
        "id": completion.id,
        "object": "text_completion",
        "created": completion.created,
        "model": completion.body.model,
        "choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}],
    }
