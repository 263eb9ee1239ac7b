"""Server-sent events: how they are written, and a response that ends its source with itself."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Send

PING_S = 15.0  # silence after which proxies are told that somebody is still there
PING = ": ping\n\n"


def format_event(data: Any, name: str | None = None) -> str:
    """One event, with JSON for its data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """Events as they come. When the client leaves, is cut off, or has read all, the source is closed."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[str, None]) -> None:
        super().__init__(_kept_alive(source), headers={"x-accel-buffering": "no"})
        self._source = source

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._source.aclose()


async def _kept_alive(source: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    coming = asyncio.ensure_future(anext(source, None))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=PING_S)
            if not done:
                yield PING
                continue
            if (text := coming.result()) is None:
                return
            yield text
            coming = asyncio.ensure_future(anext(source, None))
    finally:
        coming.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.wait({coming})


__all__ = ["EventStream", "format_event"]
