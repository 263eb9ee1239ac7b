"""Generated requests, valid and invalid, get the answers that /openapi.json documents, and never a
5xx.

A schema cannot say everything (how many tokens a text has, what a server's settings allow), so a
request that fits it may be refused. All other checks of schemathesis hold.
"""

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import serving
from .whole import ask, documents, ingest, key, server

pytestmark = [pytest.mark.enable_socket]
Up = tuple[serving.Process, dict[str, str]]  # a server, and the headers of its key
QUESTION = "What is the job of Kiralus?"
CONFIG = """
generation.max-examples = %d
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "409", "413", "415", "429"]
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    import pytest_socket

    pytest_socket.enable_socket()
    home = tmp_path_factory.mktemp("home")
    headers = key(home, "a")
    with server(home, {"RAGKV_SERVE__LIMITS__MAX_TOKENS": "8"}) as process:
        with process.client() as client:
            ingest(client, documents(), headers)
        yield process, headers


# Names that try to leave their folder, before the generated requests, which may delete the
# collection


def _raw(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    """Status and answer of a request whose path is sent as it is."""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: "
        "application/json\r\n"
    )
    head += f"authorization: {headers['authorization']}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        # In one piece: a server that refuses the path closes the connection, and a body that
        # arrives then resets it.
        connection.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        response = http.client.HTTPResponse(connection, method=method)
        response.begin()
        return response.status, response.read()


TRICKS = [
    "..", "../x", "..%2fx", "%2e%2e", ".", "a/../../b", "a%00b", "a\\b", "CON", "c:", "~", "%", "a" * 300, "é", "-x",
]  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_a_path_trick_in_a_name_reaches_nothing(up: Up, name: str) -> None:
    process, headers = up
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
        status, text = _raw(process.port, method, path, headers, body)
        assert status in (400, 404, 405), (method, path, text)
        if text.startswith(b"{"):
            assert json.loads(text)["error"]["message"]
    with process.client(headers=headers) as client:
        # in a JSON body, a percent sign encodes nothing
        if name not in ("CON", "a%00b", "%", "..%2fx", "%2e%2e"):
            assert client.post("/v1/collections", json={"name": name}).status_code == 400
        assert client.get("/v1/collections/c").json()["documents"] == 10


# Generated requests


def _run(up: Up, folder: Path, examples: int, *how: str, seed: int = 8) -> dict[str, Any]:
    """Run schemathesis with so many examples of each operation, or so many sequences; returns its
    report.
    """
    process, headers = up
    logged = len(process.lines)
    with process.client() as client:  # what the examples and defaults name
        for collection in ("default", "docs"):
            ingest(client, documents(), headers, collection)
        ask(client, QUESTION, headers, collection="docs", session_id="s1")
    config = folder / "schemathesis.toml"
    report = folder / "report.json"
    config.write_text(CONFIG % examples)
    program = str(Path(sys.executable).parent / "schemathesis")
    command = [
        program,
        "--config-file",
        str(config),
        "run",
        f"{process.url}/openapi.json",
        "--no-color",
    ]
    command += ["-H", f"Authorization: {headers['authorization']}", "--seed", str(seed)]
    command += ["--report-json-path", str(report)]
    command += [
        "--max-response-time",
        "120",
        "--request-timeout",
        "120",
        "--continue-on-failure",
        "--checks",
        "all",
    ]
    command += ["--exclude-checks", "positive_data_acceptance"]
    done = subprocess.run(
        [*command, *how], capture_output=True, text=True, cwd=folder, timeout=3000, check=False
    )
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    failed = [
        line
        for line in process.lines[logged:]
        if line.get("status", 0) >= 500 or line.get("level") == "error"
    ]
    assert failed == []
    found = dict(json.loads(report.read_text()))
    assert found["failures"] == [] and found["errors"] == []
    return found


def test_a_few_generated_requests_get_the_documented_answers(up: Up, tmp_path: Path) -> None:
    report = _run(up, tmp_path, 3, "--phases", "examples,fuzzing")
    assert report["test_cases"]["generated"] >= 100
    # coverage and stateful
    assert {phase["status"] for phase in report["phases"].values()} == {"success", "skip"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_thousands_of_generated_requests_get_the_documented_answers(up: Up, tmp_path: Path) -> None:
    report = _run(up, tmp_path, 150)
    assert report["test_cases"]["generated"] >= 3000
