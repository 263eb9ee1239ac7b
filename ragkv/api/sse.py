"""Streams of text: server-sent events, and a response that shows items as they come."""

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .failures import as_api_error
from .work import WorkItems

T = TypeVar("T")
DONE = "data: [DONE]\n\n"  # OpenAI's streams end with it.


def format_event(data: Any, name: str | None = None) -> str:
    """One event, with `data` as JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


class Stream(StreamingResponse):
    """Items as text, as they come. They are closed when the client disconnects, even before it has
    read one, or has read everything.
    """

    def __init__(
        self,
        items: WorkItems[T],
        show: Callable[[T], Iterable[str]],
        failed: Callable[[ApiError], str],
        first: str = "",
        media_type: str = "text/event-stream",
    ) -> None:
        """`first`, then what `show` makes of each item; after an error what `failed`
        makes of it.
        """

        async def texts() -> AsyncGenerator[str, None]:
            try:
                yield first
                async for item in items:
                    for text in show(item):
                        yield text
            except Exception as error:
                yield failed(as_api_error(error))

        self._close = items.close
        super().__init__(texts(), headers={"x-accel-buffering": "no"}, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
