"""What nginx refuses or bounds before a byte of it reaches Python, while `/livez` through it answers soon."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.api import serving
from tests.api.serving import small
from tests.api.whole import key

SHIPPED = Path(__file__).parents[3] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
pytestmark = [needs_nginx, pytest.mark.enable_socket]
ATTACKER = "127.0.0.2"  # another address than the bystander's: Linux has all of 127.0.0.0/8
LIVEZ_S = 1.0  # .25 on a machine that runs nothing else
HEAD = b"POST /v1/echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextmanager
def nginx(folder: Path, server_port: int, **changes: str) -> Iterator[int]:
    """The port on which nginx listens. `changes` are other values of directives, such as `client_body_timeout="1s"`."""
    port = free_port()
    text = SHIPPED.read_text("utf-8")
    values = {"listen": f"127.0.0.1:{port}", "server": f"127.0.0.1:{server_port} max_fails=0", **changes}
    for name, value in values.items():
        lines = text.splitlines()
        [at] = [number for number, line in enumerate(lines) if line.strip().startswith(f"{name} ") and ";" in line]
        text = "\n".join([*lines[:at], f"{name} {value};", *lines[at + 1 :]])
    if os.geteuid() == 0:  # its workers would have no right to the test's folder
        text = f"user root;\n{text}"
    file = folder / "nginx.conf"
    file.write_text(text.replace("/tmp/", f"{folder}/"), "utf-8")
    process = subprocess.Popen([str(NGINX), "-e", "stderr", "-c", str(file)], stderr=subprocess.DEVNULL)
    try:
        _wait_until_open(port)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _wait_until_open(port: int) -> None:
    ends = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < ends, "nginx does not listen"
            time.sleep(0.02)


class Up:
    """A small server with a key, and nginx in front of it."""

    def __init__(self, server: serving.Process, port: int, headers: dict[str, str]) -> None:
        self.server, self.port, self.headers = server, port, headers

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=self.headers, timeout=30, trust_env=False)

    def attacker(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30, source_address=(ATTACKER, 0))

    @contextmanager
    def livez_stays_fast(self) -> Iterator[None]:
        """While the block runs, `/livez` answers 200, and soon."""
        found, ended = list[tuple[int, float]](), threading.Event()

        def probe() -> None:
            with self.client() as client:
                while not found or not ended.wait(0.05):
                    began = time.monotonic()
                    status = client.get("/livez").status_code
                    found.append((status, time.monotonic() - began))

        thread = threading.Thread(target=probe)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        assert {status for status, _ in found} == {200}
        assert max(seconds for _, seconds in found) < LIVEZ_S

    def requests(self) -> int:
        """How many requests of the attacker, who has no key, reached Python so far."""
        return sum(line.get("status") == 401 for line in self.server.lines)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    import pytest_socket

    pytest_socket.enable_socket()
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("nginx")
    headers = key(home, "bystander")
    times = {"client_header_timeout": "1s", "client_body_timeout": "1s"}
    with (
        small(home, {"RAGKV_SERVE__PROXIES": '["127.0.0.1"]'}) as server,
        nginx(folder, server.port, **times) as port,
    ):
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
        began, first = time.monotonic(), 0.0
        with client.stream("GET", "/v1/stream", params={"wait_s": 0.2, "count": 8}) as stream:
            for part in stream.iter_text():
                first = first or time.monotonic() - began
                assert part
        assert first < 1.0 < time.monotonic() - began


def test_an_oversized_body_gets_413_of_nginx_and_is_not_read(up: Up) -> None:
    before = up.requests()
    with up.livez_stays_fast(), up.attacker() as one:
        one.sendall(HEAD + b"content-length: 104857600\r\n\r\n")
        answer = answer_of(one)
    assert b" 413 " in answer.split(b"\r\n")[0] and b'"body_too_large"' in answer
    assert up.requests() == before


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTT", HEAD + b"content-length: 900\r\n\r\n{"])
def test_a_request_that_does_not_arrive_in_time_is_closed_and_never_reaches_python(up: Up, sent: bytes) -> None:
    before, began = up.requests(), time.monotonic()
    with up.livez_stays_fast(), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(up.attacker()) for _ in range(50)]
        for one in slow:
            one.sendall(sent)
        assert {answer_of(one)[:12] for one in slow} <= {b"", b"HTTP/1.1 408"}
    assert time.monotonic() - began < 10
    assert up.requests() == before


def test_more_requests_at_once_than_an_address_may_have_get_429(up: Up) -> None:
    with up.livez_stays_fast(), contextlib.ExitStack() as stack:
        many = [stack.enter_context(up.attacker()) for _ in range(90)]
        for one in many:
            one.sendall(HEAD + b"content-length: 900\r\n\r\n{")  # its body never comes
        answers = [answer_of(one) for one in many]
    refused = [one for one in answers if b" 429 " in one.split(b"\r\n")[0]]
    assert len(refused) >= 20 and all(b'"too_many_requests"' in one for one in refused)


def test_more_requests_a_second_than_an_address_may_send_get_429(up: Up) -> None:
    statuses = []
    with up.livez_stays_fast(), up.attacker() as one:
        one.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400)
        one.shutdown(socket.SHUT_WR)
        statuses = [line[9:12] for line in answer_of(one).split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert b"429" in statuses or len(statuses) < 400


def test_the_metrics_are_not_there_for_others(up: Up) -> None:
    with up.client() as client:
        assert client.get("/metrics").status_code == 404


def test_without_keys_a_request_through_a_proxy_is_refused_whatever_the_settings_say(tmp_path: Path) -> None:
    with small(tmp_path) as server, nginx(tmp_path, server.port) as port:
        for at, status in ((server.port, 200), (port, 401)):
            assert httpx.post(f"http://127.0.0.1:{at}/v1/echo", json={}, trust_env=False).status_code == status
