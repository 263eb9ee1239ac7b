"""What a user sees before any document is read: help, its groups and choices, versions, completion."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from ragkv.cli.app import GROUPS, app
from ragkv.config import CODEC_NAMES, POLICY_NAMES, RETRIEVER_NAMES, SELECTOR_NAMES, SIMULATOR_POLICY_NAMES

from .conftest import Run


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that call each command and each group of commands."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*path, name))


COMMANDS = list(paths(typer.main.get_command(app)))


def words(text: str) -> str:
    """The text without boxes and line ends, so that a sentence is found wherever the help breaks it."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_of_every_command_uses_the_width_of_the_terminal_and_cuts_nothing(
    run: Run, path: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run(*path, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) == columns
    assert "…" not in shown.out
    assert not re.search(r" \.(?![\w.])", words(shown.out))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_bracket_of_a_help_text_is_taken_for_markup(path: tuple[str, ...]) -> None:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    texts = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
    assert all(text for text in texts if text is not None)
    assert not [text for text in texts if text and "[" in text]


@pytest.mark.parametrize("path", [(), ("keys",), ("docs",)], ids=" ".join)
def test_a_group_without_a_command_shows_its_help_and_exits_with_0(run: Run, path: tuple[str, ...]) -> None:
    bare, helped = run(*path), run(*path, "--help")
    assert (bare.code, bare.err) == (0, "")
    assert bare.out.strip() == helped.out.strip()


def test_the_commands_are_listed_in_groups_in_the_order_in_which_a_user_meets_them(run: Run) -> None:
    shown = run("--help").out
    titles = re.findall(r"╭─ (\w+) ─", shown)
    assert titles == ["Options", *GROUPS]
    assert list(GROUPS)[:3] == ["Start", "Ask", "Look"]
    assert shown.index("demo ") < shown.index("ingest ") < shown.index("ask ") < shown.index("gc ")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (("ask",), SELECTOR_NAMES),
        (("ask",), RETRIEVER_NAMES),
        (("ask",), ("fused", "prefix", "none")),
        (("ask",), ("auto", "float32", "bfloat16", "float16")),
        (("size",), CODEC_NAMES),
    ],
)
@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_shows_the_choices_of_an_option_and_breaks_no_name(
    run: Run, path: tuple[str, ...], names: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = words(run(*path, "--help").out)
    assert "|".join(names) in shown or all(re.search(rf"[ :]{name}[,.]", shown) for name in names)


def test_the_help_of_simulate_lists_every_policy(run: Run) -> None:
    shown = words(run("simulate", "--help").out)
    assert all(name in shown for name in (*POLICY_NAMES, *SIMULATOR_POLICY_NAMES))


@pytest.mark.parametrize("option", ["--selector", "--reuse", "--retriever", "--dtype"])
def test_a_name_that_is_no_choice_is_wrong_usage_and_the_choices_are_listed(run: Run, option: str) -> None:
    ran = run("ask", "who?", option, "[red]bogus")
    assert ran.code == 2
    assert "[red]bogus" in words(ran.err)
    assert words(ran.err).count("'") >= 6  # the choices, in quotes


def test_the_completion_of_a_word_offers_the_commands_that_begin_with_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_RAGKV_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "ragkv se")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run().out.split() == ["search", "serve"]


def test_wrong_usage_names_the_program_however_it_was_called(run: Run) -> None:
    assert "Usage: ragkv ask" in words(run("ask").err)
