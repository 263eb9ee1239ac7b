"""Pages of the site that are made when it is built: the start page from README.md, the commands from their help."""

import re
from pathlib import Path
from typing import Any

import click
from typer.main import get_command

ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page; called by mkdocs for each."""
    if page.file.src_uri == "index.md":
        return start()
    if page.file.src_uri == "reference/commands.md":
        return commands()
    return markdown


def start() -> str:
    """README.md, with its links made relative to the folder of the docs."""
    text = (ROOT / "README.md").read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"`docs/([\w-]+\.md)`", r"[\1](\1)", text)
    head, _, rest = text.partition("# ragkv\n")
    return f"# ragkv\n{rest}\n## In a checkout\n\n{head}"


def commands() -> str:
    """Every command with its help text and options."""
    from ragkv.cli.app import app

    return "# Commands\n\n" + "\n".join(_command(get_command(app), "ragkv"))


def _command(command: click.Command, name: str) -> list[str]:
    lines = [f"## `{name}`", "", command.help or "", ""] if name != "ragkv" else []
    rows = []
    for parameter in command.params:
        hidden = getattr(parameter, "hidden", False)
        if name != "ragkv" and not hidden and parameter.name != "help":
            shown = ", ".join(f"`{option}`" for option in parameter.opts)
            if isinstance(parameter, click.Argument):
                shown = f"`{parameter.human_readable_name}`"
            rows.append(f"| {shown} | {_escaped(getattr(parameter, 'help', None) or '')} |")
    if rows:
        lines += ["| option | what |", "|---|---|", *rows, ""]
    for sub, one in getattr(command, "commands", {}).items():
        lines += _command(one, f"{name} {sub}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
