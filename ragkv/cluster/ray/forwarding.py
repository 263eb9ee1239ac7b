"""A request forwarded to a replica, and the response that comes back; an ASGI application called
without a network.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

# How many parts of a response the application may be ahead.
QUEUED_MESSAGES = 64

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A complete HTTP request: its ASGI scope, its body, and the key by which its replica is
    chosen.
    """

    scope: dict[str, Any]
    body: bytes
    key: str = ""


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """The status and headers of a response. Its body follows as bytes."""

    status: int
    headers: Headers


async def call_app(
    app: ASGIApp, request: ForwardedRequest
) -> AsyncGenerator[ResponseStart | bytes, None]:
    """The response of `app`, part by part. If the generator is closed, the app sees its client
    disconnect.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(QUEUED_MESSAGES)
    disconnected = asyncio.Event()
    body_sent = False

    async def receive() -> Message:
        nonlocal body_sent
        if not body_sent:
            body_sent = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def respond() -> None:
        try:
            await app(request.scope, receive, messages.put)
        finally:
            await messages.put(None)

    task = asyncio.ensure_future(respond())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                headers = tuple((bytes(name), bytes(value)) for name, value in message["headers"])
                yield ResponseStart(message["status"], headers)
            elif message.get("body"):
                yield bytes(message["body"])
        await task
    finally:
        disconnected.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
