"""`ragkv chat`, with its lines from a pipe."""

import io
import sys
from pathlib import Path

import pytest

from .conftest import Ran, Run

NEW = ("--max-new-tokens", "3")


@pytest.fixture
def say(run: Run, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def say(*lines: str, options: tuple[str, ...] = ()) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", *NEW, *options)

    return say


def manifests(home: Path) -> int:
    return len(list(home.glob("kv/sessions/*.json")))


def test_every_line_is_a_turn_over_the_documents_it_retrieves(say, run: Run, documents: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run("ingest", documents)
    talked = say("who founded marl ?", "", "what makes the mill ?", "/stats", "/quit", "who ?")
    assert talked.code == 0, talked.err
    assert "marl.md" in talked.out and "mill.txt" in talked.out
    assert talked.out.count("first token") == 2
    assert "2 turns" in talked.out
    assert "> " not in talked.out
    assert manifests(tmp_path / "home") == 0  # nobody asked to keep it


def test_a_named_conversation_goes_on_where_it_was(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    first = say("who founded marl ?", options=("--session", "mine"))
    assert "nothing was ingested" in first.err
    again = say("/stats", "what ?", "/stats", options=("--session", "mine"))
    assert "1 turns so far" in again.out
    assert "2 turns" in again.out
    assert manifests(tmp_path / "home") == 1


def test_reset_and_forget_forget(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for command in ("/reset", "/forget"):
        assert "No turns yet" in say("who ?", command, "/stats", options=("--session", "mine")).out
        assert manifests(tmp_path / "home") == 0
        assert "1 turns" in say("who ?", command, "what ?", "/stats", options=("--session", "mine")).out
        say("/forget", options=("--session", "mine"))


def test_an_unknown_command_says_which_there_are(say) -> None:  # type: ignore[no-untyped-def]
    wrong = say("/bogus", "/quit")
    assert wrong.code == 0
    assert "/bogus" in wrong.err and "/reset" in wrong.err


@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupt_leaves_without_a_traceback_and_without_the_turn(  # type: ignore[no-untyped-def]
    say, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    say("who ?", options=("--session", "mine"))
    with monkeypatch.context() as patch:
        from ragkv.model.stopping import TextStream

        real, calls = TextStream.add, iter(range(100))

        def interrupted(self: TextStream, token: int) -> str:
            if next(calls) >= after:
                raise KeyboardInterrupt
            return real(self, token)

        patch.setattr(TextStream, "add", interrupted)
        left = say("what ?", "who ?", options=("--session", "mine"))
    assert (left.code, left.err.count("Traceback")) == (0, 0)
    assert "1 turns" in say("/stats", options=("--session", "mine")).out
