"""Server-sent events: their text, and a response that closes its source when it ends."""

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Send

from .errors import as_api_error

T = TypeVar("T")

DONE = "data: [DONE]\n\n"  # OpenAI's streams end with it.


def format_event(data: Any, name: str | None = None) -> str:
    """One event, with `data` as JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


async def openai_events(
    items: AsyncGenerator[T, None], chunks: Callable[[T], Iterable[Any]], first: Iterable[Any] = ()
) -> AsyncGenerator[str, None]:
    """The chunks `first`, those of every item, then `[DONE]`; an error ends the stream with its body instead."""
    try:
        for chunk in first:
            yield format_event(chunk)
        async for item in items:
            for chunk in chunks(item):
                yield format_event(chunk)
        yield DONE
    except Exception as error:
        yield format_event(as_api_error(error).body)
    finally:
        await items.aclose()


class EventStream(StreamingResponse):
    """Events as they come. The source is closed when the client disconnects, is cut off, or has read everything."""

    def __init__(self, source: AsyncGenerator[str, None], media_type: str = "text/event-stream") -> None:
        super().__init__(source, headers={"x-accel-buffering": "no"}, media_type=media_type)
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._source.aclose()
