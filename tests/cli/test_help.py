"""What a user sees before any document is read: help, its groups and choices, versions, completion."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from ragkv.cli.app import GROUPS, app
from ragkv.config import CODEC_NAMES, RETRIEVER_NAMES, SELECTOR_NAMES

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


@pytest.mark.parametrize("option", ["--selector", "--reuse", "--retriever", "--dtype"])
def test_a_name_that_is_no_choice_is_wrong_usage_and_the_choices_are_listed(run: Run, option: str) -> None:
    ran = run("ask", "who?", option, "[red]bogus")
    assert ran.code == 2
    assert "[red]bogus" in words(ran.err)
    assert words(ran.err).count("'") >= 6  # the choices, in quotes
