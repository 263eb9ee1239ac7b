"""Answers, names, texts and errors are printed as they are: no bracket is markup, no control
character gets through.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine
from ragkv.types import Answer, TokenEvent

from .conftest import Run
from .test_chat import Say, say

__all__ = ["say"]

HOSTILE = "[red]a[/red] [/x] [dense] [bold :smile: \x1b[31m"
SHOWN = "[red]a[/red] [/x] [dense] [bold :smile: \ufffd[31m"

PLAIN = "[red]a[/red] [/x] [dense] [bold :smile: makes"


@pytest.fixture
def bracketed(tmp_path: Path) -> Path:
    """Documents with brackets in their names and texts."""
    folder = tmp_path / "[red]docs"
    folder.mkdir()
    (folder / "[dense]mill.txt").write_text(f"The mill of Marl {HOSTILE} makes paper.\n")
    return folder


@pytest.fixture
def answers_hostile_text(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.events

    def events(self: Engine, *given: Any, **named: Any) -> Any:
        for event in real(self, *given, **named):
            if isinstance(event, Answer):
                reuse = dataclasses.replace(event.reuse, notes=(*event.reuse.notes, HOSTILE))
                yield dataclasses.replace(event, text=HOSTILE, reuse=reuse)
            elif isinstance(event, TokenEvent):
                yield dataclasses.replace(event, text=HOSTILE)
            else:
                yield event

    monkeypatch.setattr(Engine, "events", events)


@pytest.mark.usefixtures("answers_hostile_text")
def test_an_answer_its_sources_and_its_notes_are_printed_as_they_are(
    run: Run, bracketed: Path
) -> None:
    run("ingest", bracketed)
    answered = run("ask", "the mill of marl", "--max-new-tokens", "1")
    assert answered.code == 0, answered.err
    assert SHOWN in answered.out and SHOWN in answered.err
    assert "[red]docs/[dense]mill.txt" in answered.out


@pytest.mark.usefixtures("answers_hostile_text")
def test_a_chat_prints_the_text_of_each_turn_as_it_is(say: Say, run: Run, bracketed: Path) -> None:
    run("ingest", bracketed)
    chatted = say("the mill of marl", "/[red]x")
    assert chatted.code == 0, chatted.err
    assert SHOWN in chatted.out
    assert "[red]docs/[dense]mill.txt" in chatted.out
    assert "/[red]x" in chatted.err


def test_search_and_docs_print_names_and_texts_as_they_are(run: Run, bracketed: Path) -> None:
    run("ingest", bracketed)
    for command in (("search", "mill"), ("docs", "show", "[dense]mill.txt")):
        shown = run(*command)
        assert shown.code == 0, shown.err
        assert PLAIN in " ".join(
            shown.out.split()
        )  # a terminal's sequence is no part of a document
    assert "[red]docs/[dense]mill.txt" in run("docs", "list").out
    assert "[red]docs/[dense]mill.txt" in run("docs", "delete", "[dense]mill.txt").out


@pytest.mark.parametrize(
    "command",
    [
        ("ask", "who?", "--home", "[red]home"),
        ("search", "who?", "--home", "[red]home"),
        ("docs", "list", "--home", "[red]home"),
        ("gc", "--home", "[red]home"),
        ("ingest", "[red]home/[/x].txt"),
        ("chat", "--model", "/[red]home"),
        ("profile", "--model", "/[red]home"),
        ("gate", "--model", "/[red]home"),
        ("serve", "--model", "/[red]home"),
        ("keys", "revoke", "[red]home"),
    ],
    ids=lambda command: " ".join(command[:1]),
)
def test_an_error_of_a_command_keeps_the_brackets_of_what_it_names(
    run: Run, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*command)
    assert (ran.code, "[red]home" in ran.err) == (1, True), ran.err


def test_the_name_of_a_key_is_printed_as_it_is(run: Run) -> None:
    made = run("keys", "add", "[red]alice[/x]")
    assert made.out.startswith("rk-") and "[red]alice[/x]" in made.err
    assert "[red]alice[/x]" in run("keys", "list").out
