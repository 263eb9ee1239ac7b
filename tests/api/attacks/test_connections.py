"""Connections that never send a whole request: many, slow, idle, or with endless headers."""

import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragkv.api.work.connections import _client_of
from ragkv.config import MIB
from tests.api.serving import Process, process, small
from tests.api.whole import needs_reader

from .helpers import Watch, target, wait_until

pytestmark = pytest.mark.enable_socket

HEAD = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
FAST = {
    "RAGKV_SERVE__CONNECTIONS__HEAD_S": "0.6",
    "RAGKV_SERVE__CONNECTIONS__IDLE_S": "1.2",
    "RAGKV_SERVE__LIMITS__BODY_IDLE_S": "0.6",
    "RAGKV_SERVE__LIMITS__BODY_S": "1.5",
}


def connect(port: int, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=(source, 0))
    one.sendall(data)
    return one


def all_of(one: socket.socket) -> bytes:
    """Everything the server sends until it closes the connection."""
    got = b""
    try:
        while piece := one.recv(65536):
            got += piece
    except ConnectionError:
        pass
    return got


def trickle(one: socket.socket, piece: bytes, every_s: float = 0.1, most_s: float = 20.0) -> tuple[float, bytes]:
    """Send a piece again and again until the server closes; returns how long that took, and what it sent."""
    began, got = time.monotonic(), b""
    one.settimeout(every_s)
    while time.monotonic() - began < most_s:
        try:
            one.sendall(piece)
            if not (received := one.recv(65536)):
                break
            got += received
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began, got


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def rss_bytes(up: Process) -> int:
    pages = int(Path(f"/proc/{up.popen.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes(up: Process) -> int:
    lines = Path(f"/proc/{up.popen.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def descriptors(up: Process) -> int:
    return len(list(Path(f"/proc/{up.popen.pid}/fd").iterdir()))


def closed(up: Process) -> dict[str, float]:
    """The metric of closed connections, by reason."""
    with up.client() as client:
        lines = client.get("/metrics").text.splitlines()
    name = 'ragkv_connections_closed_total{reason="'
    found = [line.removeprefix(name).split('"} ') for line in lines if line.startswith(name)]
    return {reason: float(value) for reason, value in found}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with short times."""
    import pytest_socket

    pytest_socket.enable_socket()
    with small(tmp_path_factory.mktemp("home"), FAST) as up:
        yield up


@pytest.mark.parametrize("megabytes", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_headers_that_never_end_cost_no_memory(fast: Process, megabytes: int) -> None:
    before = peak_bytes(fast)
    line = b"x-a: " + b"y" * 65_000 + b"\r\n"
    with ExitStack() as stack:
        for _ in range(60):
            one = stack.enter_context(connect(fast.port, HEAD))
            try:
                for _ in range(megabytes * MIB // 60 // len(line)):
                    one.sendall(line)
            except OSError:  # the server closed it
                continue
    assert peak_bytes(fast) - before < 30 * MIB
    with fast.client() as client:
        assert client.get("/livez").status_code == 200


def test_a_head_above_the_limit_gets_431_that_names_the_limit(fast: Process) -> None:
    with connect(fast.port, HEAD + b"x-a: " + b"y" * 20_000) as one:
        answer = all_of(one)
    assert status_of(answer) == 431 and b"connections.head_bytes" in answer and b'"request_too_large"' in answer
    with fast.client() as client:
        assert client.get("/livez", headers={"x-a": "y" * 12_000}).status_code == 200
        whole = client.get("/livez", headers={"x-a": "y" * 20_000})  # arrives in one piece
        assert whole.status_code == 431 and "connections.head_bytes" in whole.json()["error"]["message"]
        many = client.get("/livez", headers={f"x-{number}": "y" for number in range(200)})
        assert many.status_code == 431 and "this server accepts 100" in many.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "piece", "status", "longest_s"),
    [
        (b"", b"", 0, 0.6),
        (b"GET /li", b"", 408, 0.6),
        (HEAD, b"x", 408, 0.6),  # slowloris: a byte now and then
        (HEAD, b"x-a: b\r\n", 408, 0.6),
        (POST + b"content-length: 900\r\n\r\n[", b"", 408, 0.6),
        (POST + b"content-length: 900\r\n\r\n[", b" ", 408, 1.5),
        (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", 408, 1.5),
        (HEAD + b"content-length: 900\r\n\r\n[", b"x", 415, 1.2),  # answered before its body is complete
        (HEAD + b"\r\n", b"", 200, 1.2),  # answered, then idle
        (HEAD + b"\r\n", b"G", 200, 1.8),
    ],
)
def test_a_client_that_does_not_send_a_whole_request_in_time_is_disconnected(
    fast: Process, sent: bytes, piece: bytes, status: int, longest_s: float
) -> None:
    with connect(fast.port, sent) as one:
        seconds, answer = trickle(one, piece)
    assert status_of(answer) == status
    assert seconds < longest_s + 10  # one that is not disconnected sends for 20 s


def test_a_client_that_keeps_its_connection_busy_keeps_it(fast: Process) -> None:
    with connect(fast.port) as one:
        for _ in range(5):  # longer than every time of this server
            time.sleep(0.5)
            one.sendall(HEAD + b"\r\n")
            answer = one.recv(65536)
            while not answer.endswith(b"}"):
                answer += one.recv(65536)
            assert status_of(answer) == 200
    with fast.client() as client, client.stream("GET", "/v1/stream?wait_s=0.7&count=4") as stream:
        assert sum(line.startswith("data:") for line in stream.iter_lines()) == 4


def test_a_request_that_follows_in_pieces_or_at_once_is_answered(fast: Process) -> None:
    body = b'{"a": 1}'
    request = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    with connect(fast.port) as one:
        one.sendall(request * 3 + HEAD + b"connection: close\r\n\r\n")
        assert all_of(one).count(b"HTTP/1.1 200 OK") == 4
    with connect(fast.port) as one:
        for place in range(0, len(request), 16):
            one.sendall(request[place : place + 16])
            time.sleep(0.01)
        assert status_of(one.recv(65536)) == 200


def test_malformed_requests_are_counted_and_do_not_fill_the_log(fast: Process) -> None:
    before, logged = closed(fast)["malformed"], len(fast.lines)
    for text in (b"\x16\x03\x01", b"GET\r\n", b"\r\n" * 50, HEAD + b"x y\r\n\r\n", b"POST / HTTP/1.1"):
        for _ in range(10):
            with connect(fast.port, text + b"\r\n\r\n") as one:
                assert status_of(all_of(one)) == 400
    assert closed(fast)["malformed"] >= before + 40
    wait_until(lambda: any(line["event"] == "connections_closed" for line in fast.lines))
    assert sum(line["event"] != "request" for line in fast.lines[logged:]) <= 1


def test_a_malformed_chunk_in_the_middle_of_a_body_ends_only_that_request(fast: Process) -> None:
    logged = len(fast.lines)
    with connect(fast.port, POST + b"transfer-encoding: chunked\r\n\r\n1\r\n[\r\n") as one:
        time.sleep(0.1)
        one.sendall(b"zz\r\n")
        assert status_of(all_of(one)) == 400
    time.sleep(0.2)
    assert [line for line in fast.lines[logged:] if line.get("level") == "error"] == []


@contextmanager
def limited(home: Path, **settings: Any) -> Iterator[Process]:
    environment = {f"RAGKV_SERVE__{name.upper()}": str(value) for name, value in settings.items()}
    with small(home, environment) as up:
        yield up


def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest(tmp_path: Path) -> None:
    with limited(tmp_path, connections__limit=8, connections__per_client=6) as up, ExitStack() as stack:
        slow = [stack.enter_context(connect(up.port, HEAD)) for _ in range(40)]
        time.sleep(0.5)
        still_open = [one for one in slow if _is_open(one)]
        assert still_open == slow[-6:]  # the client's limit
        more = [stack.enter_context(connect(up.port, HEAD, "127.0.0.2")) for _ in range(4)]
        with up.client() as client:  # a third address: every place is taken, and it is served at once
            assert client.get("/livez").status_code == 200
        assert sum(map(_is_open, slow)) + sum(map(_is_open, more)) <= 8


def test_a_connection_that_waits_for_its_answer_is_not_closed_for_another_one(tmp_path: Path) -> None:
    with limited(tmp_path, connections__limit=4) as up, ExitStack() as stack:
        request = b"GET /v1/stream?wait_s=0.5&count=6 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        busy = [stack.enter_context(connect(up.port, request)) for _ in range(4)]
        time.sleep(0.5)
        with connect(up.port, HEAD + b"\r\n") as refused:
            answer = all_of(refused)
        assert status_of(answer) == 503 and b"connections.limit" in answer and b"retry-after: 1" in answer
        assert all(b"data: 5" in all_of(one) for one in busy)


def test_the_limit_of_a_client_does_not_apply_to_a_proxy(tmp_path: Path) -> None:
    settings = {"connections__per_client": 2, "proxies": "127.0.0.0/8"}
    with limited(tmp_path, **settings) as up, ExitStack() as stack:
        open_ones = [stack.enter_context(connect(up.port, HEAD)) for _ in range(20)]
        time.sleep(0.3)
        assert all(map(_is_open, open_ones))


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", "unknown"),
    ],
)
def test_an_ipv6_client_is_its_network(address: str, client: str) -> None:
    assert _client_of(address) == client


@pytest.mark.parametrize("connections", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_descriptors_do_not_run_out_whatever_clients_open(tmp_path: Path, connections: int) -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); sys.argv[1:] = ['{}']; "
    code += "from tests.api.serving import main; main()"
    with process([sys.executable, "-c", code.format(tmp_path)]) as up, ExitStack() as stack:
        most = 0
        for number in range(connections):
            one = stack.enter_context(connect(up.port, HEAD[: number % 30], f"127.0.1.{number % 200 + 1}"))
            if number % 400 == 399:
                stack.pop_all().close()
            del one
            if number % 20 == 0:
                most = max(most, descriptors(up))
                with up.client() as client:
                    assert client.get("/livez").status_code == 200
        assert most < 256 - 40
        assert [line for line in up.lines if "out of system resource" in str(line)] == []


@needs_reader
def test_a_bystander_is_served_during_a_flood_of_slow_connections(tmp_path: Path) -> None:
    settings = {"RAGKV_SERVE__CONNECTIONS__LIMIT": "64", "RAGKV_SERVE__CONNECTIONS__HEAD_S": "5"}
    with target(tmp_path, settings) as up:
        quiet = up.watch(2.0)
        with Watch(up) as watch, ExitStack() as stack:
            ends = time.monotonic() + 4.0
            while time.monotonic() < ends:
                stack.enter_context(connect(up.process.port, HEAD))
                time.sleep(0.01)
        print(f"quiet: {quiet}\nflood: {watch}")
        assert set(watch.answers.statuses) == {200} and set(watch.livez.statuses) == {200}
        assert watch.rss_after - watch.rss_before < 200 * MIB
        assert watch.descriptors_after <= watch.descriptors_before + 64


def _is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while one.recv(65536):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
