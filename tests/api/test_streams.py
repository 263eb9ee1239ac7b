"""Clients that disconnect, read slowly or exceed the deadline: each affects only itself and
releases its resources.
"""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from ragkv import Engine
from ragkv.api.settings import LimitsConfig, QueueConfig

from .helpers import app_on, engine_of, on_port, plain, service_of, wait_until

pytestmark = pytest.mark.enable_socket
LONG = 4000
BODY = {
    "model": "talker",
    "messages": [{"role": "user", "content": "Tell me all."}],
    "max_tokens": LONG,
}


def app_of(talker: Engine, home: Path, **config: Any) -> FastAPI:
    return app_on(
        talker, home, model=str(home / "talker"), limits=LimitsConfig(max_tokens=LONG), **config
    )


@pytest.fixture
def app(talker: Engine, tmp_path: Path) -> FastAPI:
    return app_of(talker, tmp_path)


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    with on_port(app) as url:
        with plain(url) as client:
            assert client.get("/v1/stats").status_code == 200  # opens the tenant
        yield url


def working(app: FastAPI) -> int:
    return len(service_of(app).answer_pool.accepted)


def queue(app: FastAPI) -> Any:
    return engine_of(app).stats().queue


def raw(url: str, body: Any, path: str = "/v1/chat/completions") -> socket.socket:
    """Send a request over a new socket without reading the response."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(data)}"
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect((host, int(port)))
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_answer_and_stores_no_turn(
    app: FastAPI, url: str, stream: bool
) -> None:
    connection = raw(url, {**BODY, "stream": stream, "session_id": "s"})
    wait_until(lambda: working(app) == 1 and queue(app).served == 1)  # the request decodes
    connection.close()
    wait_until(lambda: working(app) == 0)
    # a stream may be closed at a token instead of cancelled
    assert queue(app).cancelled == 1 or stream
    with plain(url) as client:
        assert client.get("/v1/sessions").json()["data"] == []
        assert (
            client.post("/v1/chat/completions", json={**BODY, "max_tokens": 3}).status_code == 200
        )


def test_a_disconnect_ends_requests_that_wait_for_the_model(app: FastAPI, url: str) -> None:
    with plain(url) as client:
        client.post("/v1/chat/completions", json={**BODY, "max_tokens": 1})
    with engine_of(app).parts.scheduler.computing():  # no request can compute
        connections = [raw(url, {**BODY, "stream": stream}) for stream in (True, False, True)]
        wait_until(lambda: working(app) == 3 and queue(app).waiting + queue(app).admitted == 3)
        for connection in connections:
            connection.close()
        wait_until(lambda: working(app) == 0)
        assert (queue(app).waiting, queue(app).admitted) == (0, 0)
    assert queue(app).cancelled == 3


def after_the_deadline(patch: pytest.MonkeyPatch) -> None:
    """Let the deadlines of all requests have passed."""
    clock = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + 600.0, monotonic=time.monotonic
    )
    patch.setattr("ragkv.runtime.waiting.time", clock)


def test_a_passed_deadline_is_a_504_or_an_error_event_in_a_stream(
    talker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(talker, tmp_path, queue=QueueConfig(deadline_s=600.0))
    path = "/v1/chat/completions"
    with on_port(app) as url, plain(url) as client, ThreadPoolExecutor(1) as pool:
        assert client.get("/v1/stats").status_code == 200  # opens the tenant
        asked = pool.submit(client.post, path, json=BODY)
        wait_until(lambda: queue(app).served == 1)  # it decodes
        with monkeypatch.context() as patch:
            after_the_deadline(patch)
            whole = asked.result()
        assert (whole.status_code, whole.json()["error"]["type"]) == (504, "timeout_error")
        with client.stream("POST", path, json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data")
            with monkeypatch.context() as patch:
                after_the_deadline(patch)
                streamed = "\n".join(lines)
        assert '"deadline_exceeded"' in streamed and "[DONE]" not in streamed
        assert 'finish_reason":"stop' not in streamed
        slow = raw(url, {**BODY, "stream": True})  # the client reads nothing
        wait_until(lambda: queue(app).served == 3)
        with monkeypatch.context() as patch:
            after_the_deadline(patch)
            wait_until(lambda: queue(app).expired == 3 and working(app) == 0)
        slow.close()
