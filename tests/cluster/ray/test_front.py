"""The parts of the front that need no Ray: ASGI calls without a network, directories."""

import asyncio
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from ragkv.cluster.ray.forwarding import ForwardedRequest, ResponseStart, call_app
from ragkv.cluster.ray.replica_directory import lock_directory


class App:
    """An ASGI application that responds in parts and records whether its client disconnected."""

    def __init__(self, parts: int, fails: bool = False) -> None:
        self.parts = parts
        self.fails = fails
        self.disconnected = asyncio.Event()
        self.received = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received = (await receive())["body"]
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"text/plain")],
                }
            )
            for number in range(self.parts):
                await send(
                    {"type": "http.response.body", "body": b"%d" % number, "more_body": True}
                )
            if self.fails:
                raise RuntimeError("half way")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


def request(body: bytes = b"") -> ForwardedRequest:
    return ForwardedRequest({"type": "http", "method": "POST", "path": "/x"}, body)


async def test_a_response_is_returned_in_its_parts() -> None:
    app = App(3)
    start, *parts = [part async for part in call_app(app, request(b"body"))]
    assert start == ResponseStart(200, ((b"content-type", b"text/plain"),))
    assert (parts, app.received) == ([b"0", b"1", b"2"], b"body")


async def test_closing_the_response_cancels_an_application_that_is_far_ahead() -> None:
    app = App(10_000)
    answer = call_app(app, request())
    assert isinstance(await anext(answer), ResponseStart)
    await answer.aclose()
    assert app.disconnected.is_set()


async def test_an_error_of_the_application_reaches_the_reader() -> None:
    with pytest.raises(RuntimeError, match="half way"):
        [part async for part in call_app(App(2, fails=True), request())]


def test_a_replica_directory_has_one_user_and_keeps_its_content_for_the_next(
    tmp_path: Path,
) -> None:
    (first, lock), (second, other) = lock_directory(tmp_path), lock_directory(tmp_path)
    assert first != second
    (first / "kv").mkdir()
    lock.release()
    again, lock = lock_directory(tmp_path)
    assert again == first and (again / "kv").is_dir()
    lock.release()
    other.release()
