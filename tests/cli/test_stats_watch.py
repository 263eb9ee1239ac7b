"""`ragkv stats --watch`: the numbers again and again, a line for each change where there is no terminal."""

import json
from pathlib import Path

import pytest

from ragkv.cli import stats
from ragkv.cli.output import console

from .conftest import Run


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Between two looks nothing is waited for; Ctrl-C comes at the fourth."""
    slept = [0]

    def sleep(seconds: float) -> None:
        assert seconds == stats.EVERY_S
        slept[0] += 1
        if slept[0] == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(stats.time, "sleep", sleep)
    return slept


def test_elsewhere_than_on_a_terminal_a_line_is_written_for_each_change(
    run: Run, documents: Path, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("ingest", documents)
    real, seen = stats._read, []

    def read(home: Path) -> dict[str, object]:
        seen.append(real(home))
        return seen[-1] if len(seen) < 3 else {**seen[-1], "tokens": 99}

    monkeypatch.setattr(stats, "_read", read)
    watched = run("stats", "--watch")
    assert (watched.code, watched.err, rounds[0]) == (0, "", 4)
    first, second = watched.out.splitlines()
    assert "2 documents, 2 passages" in first and "2 entries" in first
    assert "99 tokens" in second


def test_with_json_each_change_is_one_line_of_json(run: Run, documents: Path, rounds: list[int]) -> None:
    run("ingest", documents)
    watched = run("stats", "--watch", "--json")
    assert (watched.code, rounds[0]) == (0, 4)
    assert json.loads(watched.out) == run("stats", "--json").json and watched.out.count("\n") == 1


def test_on_a_terminal_the_present_numbers_replace_the_last_ones(
    run: Run, documents: Path, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("ingest", documents)
    monkeypatch.setattr(type(console), "is_terminal", True)
    monkeypatch.setattr(console, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")
    watched = run("stats", "--watch")
    assert (watched.code, rounds[0]) == (0, 4)
    assert watched.out.count("2 documents") >= 4 and "Ctrl-C ends" in watched.out
    assert watched.out.count("\x1b[1A") >= 3  # the cursor goes up to the lines it replaces
