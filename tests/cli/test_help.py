"""What a user sees before any document is read: help, its groups and choices, versions,
completion.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from ragkv.cli.app import app

from .conftest import Run


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that call each command and each group of commands."""
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from paths(inner, (*path, name))


COMMANDS = list(paths(typer.main.get_command(app)))


def words(text: str) -> str:
    """The text without boxes and line ends, so that a sentence is found wherever the help breaks
    it.
    """
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


@pytest.mark.parametrize("option", ["--selector", "--reuse", "--retriever", "--dtype"])
def test_a_name_that_is_no_choice_is_wrong_usage_and_the_choices_are_listed(
    run: Run, option: str
) -> None:
    ran = run("ask", "who?", option, "[red]bogus")
    assert ran.code == 2
    assert "[red]bogus" in words(ran.err)
    assert words(ran.err).count("'") >= 6  # the choices, in quotes
