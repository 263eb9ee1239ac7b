"""Two processes on one home: one writes, the others read it, and a second writer is refused."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.errors import StoreLockedError
from ragkv.store.writer_lock import check_unlocked

from .conftest import Run

# The command line, without the embedder: it takes long to load.
DRIVER = """
import sys, ragkv.retrieval
ragkv.retrieval.embedders.minilm_path = lambda: None
from ragkv.cli import main
sys.argv[0] = "ragkv"
main()
"""
LIMIT_S = 120.0


@pytest.fixture
def writer(run: Run, documents: Path, tmp_path: Path) -> Iterator[int]:
    """The pid of a process that has the home open for writing: a conversation that nobody
    talks in.
    """
    assert run("ingest", documents).code == 0
    command = [sys.executable, "-c", DRIVER, "chat"]
    deadline = time.monotonic() + LIMIT_S
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=dict(os.environ)) as process:
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                check_unlocked(tmp_path / "home" / "kv")
            except StoreLockedError:
                break
            time.sleep(0.05)
        yield process.pid
        process.kill()


@pytest.mark.timeout(600)
def test_commands_that_only_read_say_who_writes_and_answer(writer: int, run: Run) -> None:
    for command in (("ask", "who founded Marl?"), ("search", "mill")):
        ran = run(*command)
        assert (ran.code, ran.err.count("writes to")) == (0, 1), (command, ran.err)
        assert re.search(
            rf"another process \(pid {writer} on .+, ragkv chat, since \d{{4}}-\d\d-\d\d .+\) "
            r"writes",
            ran.err,
        )
    answered = run("ask", "who founded Marl?", "--json").json["answer"]["reuse"]
    assert (answered["missed_chunks"], answered["fused"] > 0) == (0, True)


@pytest.mark.timeout(600)
def test_a_second_writer_is_refused_before_a_model_is_loaded(
    writer: int, run: Run, documents: Path, model_folder: Path
) -> None:
    for command in (("ingest", documents), ("chat",), ("gc",), ("gate",)):
        ran = run(*command, "--model", f"/nowhere/{model_folder.name}")
        assert (ran.code, f"is written by another process (pid {writer}" in ran.err) == (1, True), (
            command,
            ran.err,
        )
        assert "Wait for it or stop it" in ran.err


def test_an_ingest_keeps_its_priority_because_a_person_waits_for_it(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by: list[int] = []
    monkeypatch.setattr("os.nice", by.append)
    assert run("ingest", documents, "--minutes", "0").code == 0 and not any(by)
