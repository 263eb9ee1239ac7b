"""A request handed to a replica, and its answer handed back: values, and the service called without a network."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from ragkv.scheduling.replica_routing import RoutingRequest

AHEAD = 64  # parts of an answer that its reader may be behind

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Passed:
    """A request, whole."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None = None
    scheme: str = "http"
    ask: RoutingRequest = field(default_factory=RoutingRequest)  # for the router
    avoid: tuple[str, ...] = ()  # replicas that failed it

    @property
    def scope(self) -> Scope:
        """As ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


@dataclass(frozen=True, slots=True)
class Start:
    """How an answer begins; bytes follow."""

    status: int
    headers: Headers


async def answered(app: ASGIApp, passed: Passed) -> AsyncGenerator[Start | bytes, None]:
    """What `app` answers, as it comes. Closed, it is to the app as if its client had left."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(AHEAD)
    gone, asked = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": passed.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await app(passed.scope, receive, messages.put)
        finally:
            await messages.put(None)

    task = asyncio.ensure_future(work())
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield Start(message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"]))
            elif message.get("body"):
                yield bytes(message["body"])
        await task
    finally:
        gone.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


__all__ = ["Headers", "Passed", "Start", "answered"]
