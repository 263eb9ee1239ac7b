"""What nginx refuses or bounds before a byte of it reaches Python."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.api import serving
from tests.api.serving import small
from tests.api.whole import key
from tests.scheduling.helpers import until

from .attackers import ADDRESS
from .front import BEHIND, free_port, needs_nginx, nginx

pytestmark = [needs_nginx, pytest.mark.enable_socket]
HEAD = b"POST /v1/echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TOO_LARGE = HEAD + b"content-length: 104857600\r\n\r\n"


class Up:
    """A small server with a key, and nginx in front of it."""

    def __init__(self, server: serving.Process, port: int, headers: dict[str, str]) -> None:
        self.server = server
        self.port = port
        self.headers = headers

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers=self.headers,
            timeout=30,
            trust_env=False,
        )

    def attacker(self) -> socket.socket:
        return socket.create_connection(
            ("127.0.0.1", self.port), timeout=30, source_address=(ADDRESS, 0)
        )

    def requests(self) -> int:
        """How many requests of the attacker, who has no key, reached Python so far."""
        return sum(line.get("status") == 401 for line in self.server.lines)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    import pytest_socket

    pytest_socket.enable_socket()
    home = tmp_path_factory.mktemp("home")
    folder = tmp_path_factory.mktemp("nginx")
    headers = key(home, "bystander")
    times = {"client_header_timeout": "1s", "client_body_timeout": "1s"}
    with small(home, BEHIND) as server, nginx(folder, server.port, **times) as port:
        yield Up(server, port, headers)


def answer_of(one: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := one.recv(65536):
            received += piece
    return received


def test_a_request_is_passed_on_and_streams_arrive_as_they_are_made(up: Up) -> None:
    with up.client() as client:
        assert client.post("/v1/echo", json={}).status_code == 200
        with client.stream("GET", "/v1/stream", params={"wait_s": 0.2, "count": 10_000}) as stream:
            assert next(stream.iter_text())  # long before its end


@pytest.mark.parametrize(
    "sent", [b"", b"GET /livez HTT", HEAD + b"content-length: 900\r\n\r\n{", TOO_LARGE]
)
def test_a_request_that_is_too_slow_or_too_large_is_closed_and_never_reaches_python(
    up: Up, sent: bytes
) -> None:
    before = up.requests()
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(up.attacker()) for _ in range(50)]
        for one in many:
            one.sendall(sent)
        answers = [answer_of(one) for one in many]
    assert {one[:12] for one in answers} <= {b"", b"HTTP/1.1 408", b"HTTP/1.1 413"}
    assert sent != TOO_LARGE or all(b'"body_too_large"' in one for one in answers)
    assert up.requests() == before


def test_more_requests_at_once_than_an_address_may_have_get_429(up: Up, tmp_path: Path) -> None:
    with nginx(tmp_path, up.server.port) as port, contextlib.ExitStack() as stack:
        shipped = Up(up.server, port, up.headers)
        many = [stack.enter_context(shipped.attacker()) for _ in range(90)]
        for one in many:
            one.sendall(HEAD + b"content-length: 900\r\n\r\n{")  # its body never comes
        until(lambda: len(select.select(many, [], [], 0)[0]) >= 20)
        answers = [answer_of(one) for one in select.select(many, [], [], 0)[0]]
    assert all(
        b" 429 " in one.split(b"\r\n")[0] and b'"too_many_requests"' in one for one in answers
    )


def test_large_bodies_that_are_no_documents_come_slowly(up: Up) -> None:
    large = {"content": b'"%s"' % (b"x" * 400_000), "headers": {"content-type": "application/json"}}
    with up.client() as client:
        assert client.get("/metrics").status_code == 404
        for path, refused in (("/v1/collections/c/documents", False), ("/v1/echo", True)):
            assert (429 in {client.post(path, **large).status_code for _ in range(40)}) == refused
            assert client.post("/v1/echo", json={}).status_code == 200


SPELLINGS = ("Bearer", "bearer", "BEARER", "bEaReR", "Bearer ", "BearEr  ")


def test_a_key_has_one_count_however_the_word_before_it_is_written(up: Up) -> None:
    _, _, secret = up.headers["authorization"].partition(" ")
    with up.client() as client, ThreadPoolExecutor(40) as pool:

        def ask(number: int) -> int:
            headers = {"authorization": f"{SPELLINGS[number % len(SPELLINGS)]} {secret}"}
            return client.post("/v1/ask", json={}, headers=headers).status_code

        statuses = list(pool.map(ask, range(80)))
    assert statuses.count(429) > 20, "one spelling alone may ask 20 at once"


@pytest.mark.parametrize("word", ["chunked", "CHUNKED", "Chunked", "cHUNKeD"])
def test_a_body_of_unknown_length_comes_slowly_however_the_header_is_written(
    up: Up, word: str
) -> None:
    head = HEAD + b"transfer-encoding: " + word.encode() + b"\r\n\r\n"
    answers = list[bytes]()
    for _ in range(30):
        with up.attacker() as one:
            one.sendall(head + b"2\r\n{}\r\n0\r\n\r\n")
            answers.append(one.recv(12))
    assert b"HTTP/1.1 429" in answers
    time.sleep(2.0)  # the count of the address goes down for the next test


def test_questions_come_slowly_and_those_whose_clients_left_not_at_all(up: Up) -> None:
    before = up.requests()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(up.attacker()).sendall(
                HEAD.replace(b"echo", b"ask") + b"content-length: 2\r\n\r\n{}"
            )
        until(lambda: up.requests() - before >= 10)
    most = 12 + 5 * (time.monotonic() - began)
    time.sleep(3.0)  # by then those that waited would have come
    assert up.requests() - before <= most


def test_without_keys_a_request_through_a_proxy_is_refused_whatever_the_settings_say(
    tmp_path: Path,
) -> None:
    with small(tmp_path) as server, nginx(tmp_path, server.port) as port:
        for at, status in ((server.port, 200), (port, 401)):
            assert (
                httpx.post(f"http://127.0.0.1:{at}/v1/echo", json={}, trust_env=False).status_code
                == status
            )


def test_while_the_server_is_away_nginx_answers_503_in_its_shape(tmp_path: Path) -> None:
    with nginx(tmp_path, free_port()) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/echo", json={}, trust_env=False)
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"]) == (
        503,
        "2",
        "away",
    )
