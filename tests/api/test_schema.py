"""Generated requests, valid and invalid, get the answers that /openapi.json documents, and never a 5xx.

A schema cannot say everything (how many tokens a text has, what a server's settings allow), so a request that fits it
may be refused. All other checks of schemathesis hold.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import serving
from .whole import ask, documents, ingest, key, needs_reader, server

pytestmark = [needs_reader, pytest.mark.enable_socket]
QUESTION = "What is the job of Kiralus?"
CONFIG = """
generation.max-examples = %d
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "409", "413", "415", "429"]
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[serving.Process, dict[str, str]]]:
    import pytest_socket

    pytest_socket.enable_socket()
    home = tmp_path_factory.mktemp("home")
    headers = key(home, "a")
    with server(home, {"RAGKV_SERVE__LIMITS__MAX_TOKENS": "8"}) as process:
        yield process, headers


def _run(
    up: tuple[serving.Process, dict[str, str]], folder: Path, examples: int, *how: str, seed: int = 8
) -> dict[str, Any]:
    """Run schemathesis with so many examples of each operation, or so many sequences; returns its report."""
    process, headers = up
    logged = len(process.lines)
    with process.client() as client:  # what the examples and defaults name
        for collection in ("default", "docs"):
            ingest(client, documents(), headers, collection)
        ask(client, QUESTION, headers, collection="docs", session_id="s1")
    config, report = folder / "schemathesis.toml", folder / "report.json"
    config.write_text(CONFIG % examples)
    program = str(Path(sys.executable).parent / "schemathesis")
    command = [program, "--config-file", str(config), "run", f"{process.url}/openapi.json", "--no-color"]
    command += [
        "-H",
        f"Authorization: {headers['authorization']}",
        "--seed",
        str(seed),
        "--report-json-path",
        str(report),
    ]
    command += ["--max-response-time", "120", "--request-timeout", "120", "--continue-on-failure", "--checks", "all"]
    command += ["--exclude-checks", "positive_data_acceptance"]
    done = subprocess.run([*command, *how], capture_output=True, text=True, cwd=folder, timeout=3000, check=False)
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    failed = [line for line in process.lines[logged:] if line.get("status", 0) >= 500 or line.get("level") == "error"]
    assert failed == []
    found = dict(json.loads(report.read_text()))
    assert found["failures"] == [] and found["errors"] == []
    return found


def test_a_few_generated_requests_get_the_documented_answers(
    up: tuple[serving.Process, dict[str, str]], tmp_path: Path
) -> None:
    report = _run(up, tmp_path, 3, "--phases", "examples,fuzzing")
    assert report["test_cases"]["generated"] >= 100
    assert {phase["status"] for phase in report["phases"].values()} == {"success", "skip"}  # coverage and stateful


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_thousands_of_generated_requests_get_the_documented_answers(
    up: tuple[serving.Process, dict[str, str]], tmp_path: Path
) -> None:
    report = _run(up, tmp_path, 150)
    assert report["test_cases"]["generated"] >= 3000
