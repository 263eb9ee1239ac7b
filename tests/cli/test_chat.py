"""`ragkv chat`, with lines from a pipe."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import CommandResult, Run

Say = Callable[..., CommandResult]

NEW = ("--max-new-tokens", "3")


@pytest.fixture
def say(run: Run, monkeypatch: pytest.MonkeyPatch) -> Say:
    def say(*lines: str, options: tuple[str, ...] = ()) -> CommandResult:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", *NEW, *options)

    return say


def manifests(home: Path) -> int:
    return len(list(home.glob("kv/sessions/*.json")))


def test_every_line_is_a_turn_with_its_own_retrieved_documents(
    say: Say, run: Run, documents: Path, tmp_path: Path
) -> None:
    run("ingest", documents)
    chatted = say("who founded marl ?", "", "what makes the mill ?", "/quit", "who ?")
    assert chatted.code == 0, chatted.err
    assert "marl.md" in chatted.out and "mill.txt" in chatted.out
    assert chatted.out.count("first token") == 2
    assert "> " not in chatted.out
    assert manifests(tmp_path / "home") == 0  # a conversation without an id is not kept


def test_a_named_conversation_continues_in_the_next_chat(say: Say, tmp_path: Path) -> None:
    first = say("who founded marl ?", options=("--session", "mine"))
    assert "nothing was ingested" in first.err
    assert "1 turn so far" in say("what ?", options=("--session", "mine")).out
    assert "2 turns so far" in say(options=("--session", "mine")).out
    assert manifests(tmp_path / "home") == 1


def test_reset_removes_all_turns(say: Say, tmp_path: Path) -> None:
    say("who ?", "/reset", options=("--session", "mine"))
    assert manifests(tmp_path / "home") == 0
    assert "turns so far" not in say("who ?", "/reset", "what ?", options=("--session", "mine")).out
    assert "1 turn so far" in say(options=("--session", "mine")).out


def test_an_unknown_command_prints_the_known_commands(say: Say) -> None:
    wrong = say("/bogus", "/quit")
    assert wrong.code == 0
    assert "/bogus" in wrong.err and "/reset" in wrong.err


@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupt_ends_the_chat_without_a_traceback_and_drops_the_turn(
    say: Say, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    say("who ?", options=("--session", "mine"))
    with monkeypatch.context() as patch:
        from ragkv.model.decode.stopping import TextStream

        real = TextStream.add
        calls = iter(range(100))

        def interrupted(self: TextStream, token: int) -> str:
            if next(calls) >= after:
                raise KeyboardInterrupt
            return real(self, token)

        patch.setattr(TextStream, "add", interrupted)
        left = say("what ?", "who ?", options=("--session", "mine"))
    assert (left.code, left.err.count("Traceback")) == (0, 0)
    assert "1 turn so far" in say(options=("--session", "mine")).out


def test_where_and_ratio_hold_for_every_turn(say: Say, run: Run, documents: Path) -> None:
    (documents / "rows.jsonl").write_text(
        '{"text": "the mill of marl", "town": "marl", "source": "one"}\n'
        '{"text": "the mill of quill", "town": "quill", "source": "two"}\n'
    )
    run("ingest", documents)
    chatted = say("the mill", "the mill", options=("--where", "town=quill", "--ratio", "1"))
    assert chatted.code == 0, chatted.err
    assert chatted.out.count("two (") == 2
    assert "one (" not in chatted.out and "marl.md" not in chatted.out
    assert "--where 'town'" in say("x", options=("--where", "town")).err
