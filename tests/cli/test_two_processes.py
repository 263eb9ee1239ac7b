"""Two processes on one home: one writes and follows a folder, the others read it, and a second writer is refused."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import Run

# The command line, without the embedder: it takes long to load.
DRIVER = """
import sys, ragkv.retrieval
ragkv.retrieval.resolve_embedder = lambda **_: None
from ragkv.cli import main
sys.argv[0] = "ragkv"
main()
"""
LIMIT_S = 120.0


def ignore_interrupts() -> None:
    """A shell without job control starts its background jobs so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Watcher:
    """A process that runs `ragkv ingest --watch`, as a background job."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._log = log
        arguments = [sys.executable, "-c", DRIVER, "ingest", str(folder), "--watch"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                arguments, stdout=errors, stderr=errors, env=dict(os.environ), preexec_fn=ignore_interrupts
            )

    def wait_for(self, pattern: str) -> None:
        """Wait until the log matches."""
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self._log.read_text()):
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, f"no {pattern!r} in {self._log.read_text()}"
            time.sleep(0.05)


@pytest.fixture
def watcher(run: Run, documents: Path, tmp_path: Path) -> Iterator[Watcher]:  # noqa: ARG001 - `run` sets the home
    pytest.importorskip("watchfiles", reason="needs watchfiles (extra watch)")
    watcher = Watcher(documents, tmp_path / "watcher.log")
    yield watcher
    watcher.process.kill()
    watcher.process.wait()


@pytest.mark.timeout(600)
def test_a_folder_is_followed_while_others_read_the_home(watcher: Watcher, run: Run, documents: Path) -> None:
    watcher.wait_for("following changes")
    check_readers(run, watcher.process.pid)
    check_second_writers(run, documents, watcher.process.pid)
    check_changes(watcher, documents, lambda: len(run("docs", "list", "--json").json))
    watcher.process.send_signal(signal.SIGINT)
    watcher.wait_for("no longer following changes")
    assert watcher.process.wait(LIMIT_S) == 0


def test_following_a_folder_ends_at_sigterm(watcher: Watcher) -> None:
    watcher.wait_for("following changes")
    watcher.process.send_signal(signal.SIGTERM)
    watcher.wait_for("no longer following changes")
    assert watcher.process.wait(LIMIT_S) == 0


def check_readers(run: Run, pid: int) -> None:
    """Commands that only read say who writes, once, and answer."""
    for command in (("ask", "who founded Marl?"), ("search", "mill")):
        ran = run(*command)
        assert (ran.code, ran.err.count("writes to")) == (0, 1), (command, ran.err)
        assert re.search(
            rf"another process \(pid {pid} on .+, ragkv ingest, since \d{{4}}-\d\d-\d\d .+\) writes", ran.err
        )
    answered = run("ask", "who founded Marl?", "--json").json["answer"]["reuse"]
    assert (answered["missed_chunks"], answered["fused"] > 0) == (0, True)


def check_second_writers(run: Run, documents: Path, pid: int) -> None:
    """Commands that write are refused before a model is loaded."""
    for command in (("ingest", documents), ("chat",), ("gc",)):
        began = time.monotonic()
        ran = run(*command, "--model", "/nowhere/model")
        assert (ran.code, f"is written by another process (pid {pid}" in ran.err) == (1, True), (command, ran.err)
        assert "Wait for it or stop it" in ran.err
        assert time.monotonic() - began < 30  # nothing waits for the writer


def check_changes(watcher: Watcher, documents: Path, count: Callable[[], int]) -> None:
    """New, changed, deleted and bad files are told, and the index follows."""
    (documents / "new.txt").write_text("The new mill.")
    watcher.wait_for(r"added: .*new\.txt")
    (documents / "new.txt").write_text("The new mill of Marl.")
    watcher.wait_for(r"changed: .*new\.txt")
    assert count() == 3
    (documents / "new.txt").unlink()
    watcher.wait_for(r"deleted: .*new\.txt")
    assert count() == 2
    (documents / "bad.txt").write_bytes(b"\0")
    watcher.wait_for(r"failed: .*bad\.txt looks binary")
    assert count() == 2
