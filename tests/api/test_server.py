"""Shutdown: after the first signal running answers finish and no new ones begin; the second ends
the process.
"""

import contextlib
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn

from ragkv.api.server import GracefulServer
from ragkv.api.settings import ServeConfig
from tests.faults import raising
from tests.scheduling.helpers import begin, until

from .serving import Process, small

pytestmark = pytest.mark.enable_socket


def refuses(server: Process) -> bool:
    """Whether the server takes no new connection."""
    try:
        httpx.post(f"{server.url}/v1/echo", json={}, trust_env=False)
    except httpx.TransportError as error:
        return isinstance(error, httpx.ConnectError)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_running_answers_finish_and_no_new_ones_begin(
    tmp_path: Path, number: int
) -> None:
    with small(tmp_path) as server, server.client() as it:
        with it.stream("GET", "/v1/stream", params={"wait_s": 0.2, "count": 15}) as running:
            parts = running.iter_text()
            text = next(parts)
            server.signal(number)
            server.wait_for(lambda line: line["event"] == "draining")
            until(lambda: refuses(server))
            assert server.popen.poll() is None
            text += "".join(parts)
        assert text.count("data: ") == 15
        assert server.ended() == 0 and "cut" not in [line["event"] for line in server.lines]


def test_an_answer_longer_than_the_graceful_period_is_cut(tmp_path: Path) -> None:
    with small(tmp_path, {"RAGKV_SERVE__GRACEFUL_S": "0.3"}) as server, server.client() as it:
        with (
            pytest.raises(httpx.RemoteProtocolError),
            it.stream("GET", "/v1/stream", params={"wait_s": 0.2, "count": 1000}) as running,
        ):
            for number, _ in enumerate(running.iter_text()):
                if number == 1:
                    server.signal(signal.SIGTERM)
        assert server.ended() == 0 and "cut" in [line["event"] for line in server.lines]


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    settings = {"RAGKV_SERVE__GRACEFUL_S": "0.3", "RAGKV_SERVE__CLOSE_S": "3"}
    with small(tmp_path, settings) as server, server.client() as it:

        def hang() -> None:
            with contextlib.suppress(httpx.HTTPError):
                it.post("/v1/hangs", json={})

        hanging = begin(hang)
        server.wait_for(lambda line: line["event"] == "hangs")
        server.signal(signal.SIGTERM)
        assert server.ended() == 1
        hanging.join()
        server.wait_for(lambda line: line["event"] == "ended_by_force")


def test_a_second_signal_ends_the_process_immediately(tmp_path: Path) -> None:
    with (
        small(tmp_path) as server,
        server.client() as it,
        it.stream("GET", "/v1/stream?wait_s=1&count=99") as running,
    ):
        pieces = running.iter_text()  # kept: httpx closes the connection with it
        next(pieces)
        server.signal(signal.SIGTERM)
        server.wait_for(lambda line: line["event"] == "draining")
        server.signal(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM  # the stream would go on for 99 s


@pytest.mark.enable_socket
@pytest.mark.parametrize(
    ("piece", "count", "is_cut"),
    [(b"x", 3000, True), (b"xy" * 10, 3000, True), (b"x" * 600, 3000, False), (b"x", 900, False)],
)
def test_a_body_in_very_many_small_pieces_ends_its_connection(
    tmp_path: Path, piece: bytes, count: int, is_cut: bool
) -> None:
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
    head = b"POST /v1/echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with small(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as one:
            answer = b""
            with contextlib.suppress(ConnectionError):
                one.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + chunk * count)
                one.sendall(b"0\r\n\r\n")
                answer = one.recv(12)
        assert (answer == b"") == is_cut
        with server.client() as client:
            assert client.get("/livez").status_code == 200


def test_a_server_ends_though_the_system_has_no_thread_to_watch_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[object] = []

    async def shutdown(server: uvicorn.Server, *_: object) -> None:
        ended.append(server)

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    server = GracefulServer(uvicorn.Config("none"), lambda: None, ServeConfig())
    coroutine = server.shutdown()
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert ended == [server]
