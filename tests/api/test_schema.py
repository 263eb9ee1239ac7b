"""Generated requests, valid and invalid, get the answers that /openapi.json documents, and never a 5xx.

One check of schemathesis is left out: that every request that fits the schema is accepted. Such a request may still
exceed this server's limits, name an unknown retriever, or use a parameter that is not offered; then it gets a 400.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import serving
from .whole import ask, documents, ingest, key, needs_reader, server, whole

pytestmark = [needs_reader, pytest.mark.enable_socket]
QUESTION = "What is the job of Kiralus?"
SEEDED = '[parameters]\n"path.name" = "c"\n"path.session_id" = "s"\n"path.document_id" = "02-ebbmax.md"\n'


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[serving.Process, dict[str, str]]]:
    import pytest_socket

    pytest_socket.enable_socket()
    home = tmp_path_factory.mktemp("home")
    headers = key(home, "a")
    with server(home, {"RAGKV_SERVE__LIMITS__MAX_TOKENS": "8"}) as process:
        yield process, headers


def _run(up: tuple[serving.Process, dict[str, str]], tmp_path: Path, seeded: bool, *how: str) -> int:
    """Run schemathesis; returns the number of generated requests."""
    process, headers = up
    logged = len(process.lines)
    with process.client() as client:  # the resources that paths name; an earlier run may have deleted them
        ingest(client, documents(), headers)
        ask(client, QUESTION, headers, session_id="s")
    config = tmp_path / "schemathesis.toml"
    config.write_text(SEEDED if seeded else "")
    command = [str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(config), "run"]
    command += [f"{process.url}/openapi.json", "-H", f"Authorization: {headers['authorization']}", "--no-color"]
    command += [
        "--max-response-time",
        "120",
        "--request-timeout",
        "120",
        "--checks",
        "all",
        "--exclude-checks",
        "positive_data_acceptance",
        "--seed",
        "8",
        *how,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=3000)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "nresolvable" not in done.stdout
    failed = [line for line in process.lines[logged:] if line.get("status", 0) >= 500 or line.get("level") == "error"]
    assert failed == []
    found = re.search(r"(\d+) generated", done.stdout)
    assert found, done.stdout[-2000:]
    return int(found[1])


@pytest.mark.parametrize("seeded", [False, True])
def test_a_few_generated_requests_get_the_documented_answers(
    up: tuple[serving.Process, dict[str, str]], tmp_path: Path, seeded: bool
) -> None:
    assert _run(up, tmp_path, seeded, "--phases", "fuzzing", "-n", "3") >= 50


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [False, True])
def test_two_thousand_generated_requests_get_the_documented_answers(
    up: tuple[serving.Process, dict[str, str]], tmp_path: Path, seeded: bool
) -> None:
    phases = ["--phases", "coverage,fuzzing"] if seeded else []
    assert _run(up, tmp_path, seeded, *phases, "-n", "60", "--continue-on-failure") >= 2000


def test_every_operation_declares_its_errors_and_its_key(tmp_path: Path) -> None:
    with whole(tmp_path) as client:
        assert "security" not in client.get("/openapi.json").json()["paths"]["/v1/ask"]["post"]  # without keys
        key(tmp_path, "a")
        schema: Any = client.get("/openapi.json").json()
    operations = [
        (path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
        if path.startswith("/v1/")
    ]
    assert len(operations) >= 22
    for path, method, operation in operations:
        assert {"400", "401", "403", "413", "415", "429", "503"} <= set(operation["responses"]), (path, method)
        assert operation["security"] == [{"key": []}]
    assert "security" not in schema["paths"]["/livez"]["get"]


def test_a_405_lists_every_method_of_the_path(tmp_path: Path) -> None:
    with whole(tmp_path) as client:
        for path, methods in (
            ("/v1/collections/c/documents/d", "DELETE, GET, PUT"),
            ("/v1/collections", "GET, POST"),
            ("/v1/sessions/s", "DELETE, GET"),
            ("/v1/ask", "POST"),
            ("/livez", "GET"),
        ):
            response = client.patch(path, json={})
            assert (response.status_code, response.headers["allow"]) == (405, methods)
