"""/v1/chat/completions, as OpenAI has it, with documents."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from ..chatting import Chat
from ..errors import as_api_error, responses
from ..openai_chat import ChatRequest, ChatResponse
from ..schemas import SESSION_PATTERN
from ..service import Here, Who
from ..sse import EventStream, format_event
from ..work import Call, started

router = APIRouter(prefix="/v1", tags=["openai"])

DONE = "data: [DONE]\n\n"
_STREAM = "With `stream`: chat.completion.chunk objects, then `[DONE]`; the last chunk has `ragkv`."


@router.post(
    "/chat/completions",
    summary="Answer a chat",
    response_model=ChatResponse,
    responses={
        **responses(404),
        200: {"description": _STREAM, "content": {"text/event-stream": {}}},
    },
)
async def chat(
    body: ChatRequest,
    request: Request,
    service: Here,
    who: Who,
    x_session_id: Annotated[str | None, Header(pattern=SESSION_PATTERN, description="As `session_id`.")] = None,
) -> ChatResponse | Response:
    """OpenAI's endpoint. `documents` come with the request, or `rag` finds them; the answer cites them as [n]."""
    asked = Chat(service, request, who, body, body.session_id or x_session_id)
    asked.check()
    if body.stream:
        return EventStream(_chunks(asked, await started(request, service.answers.stream(asked.events))))

    def whole(call: Call) -> ChatResponse:
        *_, answer = asked.events(call)
        assert isinstance(answer, ChatResponse)
        return answer

    return await service.answers.run(request, whole)


async def _chunks(asked: Chat, items: AsyncGenerator[str | ChatResponse, None]) -> AsyncGenerator[str, None]:
    options = asked.body.stream_options
    counted = options is not None and options.include_usage
    try:
        yield format_event(_chunk(asked, counted, {"role": "assistant", "content": ""}))
        async for item in items:
            if isinstance(item, str):
                yield format_event(_chunk(asked, counted, {"content": item}))
            else:
                for last in _last(asked, item, counted):
                    yield format_event(last)
        yield DONE
    except Exception as error:
        yield format_event(as_api_error(error).body)
    finally:
        await items.aclose()


def _last(asked: Chat, whole: ChatResponse, counted: bool) -> list[dict[str, Any]]:
    """The chunk that ends the answer and, if it is asked for, the one with the usage; the report is in the last."""
    choice = whole.choices[0]
    annotations = [one.model_dump() for one in choice.message.annotations]
    delta = {"annotations": annotations} if annotations else {}
    chunks = [_chunk(asked, counted, delta, choice.finish_reason)]
    if counted:
        chunks.append({**_chunk(asked, counted, {}), "choices": [], "usage": whole.usage.model_dump()})
    chunks[-1]["ragkv"] = whole.ragkv.model_dump()
    return chunks


def _chunk(asked: Chat, counted: bool, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": asked.id,
        "object": "chat.completion.chunk",
        "created": asked.created,
        "model": asked.body.model,
        "choices": [choice],
        **({"usage": None} if counted else {}),
    }


__all__ = ["router"]
