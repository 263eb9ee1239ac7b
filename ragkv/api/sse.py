"""Server-sent events: their text, and a response that closes its source when it ends."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Send

from .errors import as_api_error

T = TypeVar("T")

DONE = "data: [DONE]\n\n"  # OpenAI's streams end with it.
PING_S = 15.0  # After so much silence a ping tells proxies that the connection is alive.
PING = ": ping\n\n"


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

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[str, None]) -> None:
        super().__init__(_with_pings(source), headers={"x-accel-buffering": "no"})
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._source.aclose()


async def _with_pings(source: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    pending = asyncio.ensure_future(anext(source, None))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=PING_S)
            if not done:
                yield PING
                continue
            if (text := pending.result()) is None:
                return
            yield text
            pending = asyncio.ensure_future(anext(source, None))
    finally:
        pending.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.wait({pending})
