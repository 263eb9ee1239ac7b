"""Two processes on one home: one writes, the others read it, and a second writer is refused."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ragkv.cli import giving_way
from ragkv.errors import StoreLockedError
from ragkv.retrieval.rag import Rag
from ragkv.store.directory import check_unlocked

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
    """The pid of a process that has the home open for writing: a conversation that nobody talks in."""
    assert run("ingest", documents).code == 0
    command, deadline = [sys.executable, "-c", DRIVER, "chat"], time.monotonic() + LIMIT_S
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
            rf"another process \(pid {writer} on .+, ragkv chat, since \d{{4}}-\d\d-\d\d .+\) writes", ran.err
        )
    answered = run("ask", "who founded Marl?", "--json").json["answer"]["reuse"]
    assert (answered["missed_chunks"], answered["fused"] > 0) == (0, True)


@pytest.mark.timeout(600)
def test_a_second_writer_is_refused_before_a_model_is_loaded(
    writer: int, run: Run, documents: Path, model_folder: Path
) -> None:
    for command in (("ingest", documents), ("chat",), ("gc",), ("gate",)):
        began = time.monotonic()
        ran = run(*command, "--model", f"/nowhere/{model_folder.name}")
        assert (ran.code, f"is written by another process (pid {writer}" in ran.err) == (1, True), (command, ran.err)
        assert "Wait for it or stop it" in ran.err
        assert time.monotonic() - began < 30  # nothing waits for the writer


@pytest.mark.timeout(600)
def test_an_ingest_gives_way_to_a_question(
    run: Run, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits while a question is asked, which goes first from loading on, but not for ever."""
    assert run("ingest", documents, "--index-only").code == 0
    said, seen, question = list[str](), list[bool](), ExitStack()
    question.enter_context(giving_way.going_first(tmp_path / "home"))
    with monkeypatch.context() as patched:
        patched.setattr(giving_way, "print_note", lambda text: (said.append(text), question.close()))
        assert run("ingest", documents).code == 0
    assert said == ["a question is asked: this goes on after its answer."]
    other = giving_way.GivingWay(tmp_path / "home", lambda: seen.append(other._is_held()))
    monkeypatch.setattr(Rag, "retrieve", lambda *_, **__: other() or ())
    monkeypatch.setattr(giving_way, "WAIT_S", 0.0)
    assert run("ask", "who founded Marl?").code == 0
    assert seen == [True, True]  # looked at again before the wait ended
    other()
    assert seen[2:] == [False]
