"""Misbehaving clients: each gets a clear error or is disconnected, and no other client is affected."""

import http.client
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from . import serving
from .whole import ask, documents, ingest, needs_reader, server

pytestmark = [needs_reader, pytest.mark.enable_socket]
JSON = {"content-type": "application/json"}
QUESTION = "What is the job of Kiralus?"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    import pytest_socket

    pytest_socket.enable_socket()
    home = tmp_path_factory.mktemp("home")
    with server(home, {"RAGKV_SERVE__QUEUE__LIMIT": "8"}) as process:
        with process.client() as client:
            ingest(client, documents())
            ask(client, QUESTION)
        yield process


@pytest.fixture(autouse=True)
def _healthy_afterwards(up: serving.Process) -> Iterator[None]:
    """After each test the server answers as before, has logged no error, and runs no other request."""
    logged = len(up.lines)
    yield
    with up.client() as client:
        ends = time.monotonic() + 20
        while _metric(client, "ragkv_requests_running") != 1:  # the request for the metrics
            assert time.monotonic() < ends, "a request is left running"
            time.sleep(0.05)
        answer = ask(client, QUESTION)
        assert answer.status_code == 200 and answer.json()["answer"].strip() == "librarian"
    assert [line for line in up.lines[logged:] if line.get("level") == "error" and "Timeout" not in str(line)] == []


def _metric(client: httpx.Client, name: str) -> float:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def _refused(response: httpx.Response, *statuses: int) -> None:
    assert response.status_code in statuses, response.text
    assert response.json()["error"]["message"]


def test_clients_that_disconnect_while_sending_do_no_harm(up: serving.Process) -> None:
    body = json.dumps({"question": QUESTION, "collection": "c", "max_tokens": 200}).encode()
    head = b"POST /v1/ask HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for kept in (0, len(body) // 2, len(body)):
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", up.port)) as one:
                one.sendall(head % len(body) + body[:kept])


def _raw(up: serving.Process, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and answer of a request whose path is sent as it is."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", up.port), timeout=20) as connection:
        # In one piece: a server that refuses the path closes the connection, and a body that arrives then resets it.
        connection.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return response.status, response.read()


TRICKS = [
    "..", "../x", "..%2fx", "%2e%2e", ".", "a/../../b", "a%00b", "a\\b", "CON", "c:", "~", "%", "a" * 300, "é", "-x",
]  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_a_path_trick_in_a_name_reaches_nothing(up: serving.Process, name: str) -> None:
    for method, path in (
        ("GET", f"/v1/collections/{name}"),
        ("DELETE", f"/v1/collections/{name}"),
        ("POST", f"/v1/collections/{name}/search"),
        ("GET", f"/v1/collections/c/documents/{name}"),
        ("DELETE", f"/v1/collections/c/documents/{name}"),
        ("GET", f"/v1/sessions/{name}"),
        ("DELETE", f"/v1/sessions/{name}"),
        ("GET", f"/v1/models/{name}"),
        ("GET", f"/static/{name}"),
        ("GET", f"/static/../{name}"),
    ):
        body = b'{"query": "x"}' if method == "POST" else b""
        status, text = _raw(up, method, path, body)
        assert status in (400, 404, 405), (method, path, text)
        if text.startswith(b"{"):
            assert json.loads(text)["error"]["message"]
    with up.client() as client:
        if name not in ("CON", "a%00b", "%", "..%2fx", "%2e%2e"):  # in a JSON body, a percent sign encodes nothing
            _refused(client.post("/v1/collections", json={"name": name}), 400)
        assert client.get("/v1/collections/c").json()["documents"] == 10
