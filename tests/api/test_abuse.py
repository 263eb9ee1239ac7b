"""Names that try to leave their folder get an error and reach nothing, sent over a socket as they are."""

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from . import serving
from .whole import documents, ingest, needs_reader, server

pytestmark = [needs_reader, pytest.mark.enable_socket]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    import pytest_socket

    pytest_socket.enable_socket()
    home = tmp_path_factory.mktemp("home")
    with server(home) as process:
        with process.client() as client:
            ingest(client, documents())
        yield process


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
            assert client.post("/v1/collections", json={"name": name}).status_code == 400
        assert client.get("/v1/collections/c").json()["documents"] == 10
