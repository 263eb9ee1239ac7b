"""Pages of the site that are made when it is built: README.md, the commands' help, the
notebooks.
"""

import json
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files
from typer.main import get_command

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page for each notebook, and the notebook itself; called by mkdocs once."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path)))
    return files


def notebook(path: Path) -> str:
    """The text and the code of a notebook; its outputs are not stored."""
    title, *cells = json.loads(path.read_text("utf-8"))["cells"]
    source = f"[{path.name}]({path.name}), in a checkout `examples/notebooks/{path.name}`"
    parts = ["".join(title["source"]), f"Run the notebook to see its outputs and plots: {source}."]
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page; called by mkdocs for each."""
    if page.file.src_uri == "index.md":
        return start()
    if page.file.src_uri == "reference/commands.md":
        return commands()
    return markdown


def start() -> str:
    """README.md, then the list of all pages, which is this page in a checkout.

    Links are made relative to the folder of the docs. Those to other files of a checkout become
    plain text.
    """
    readme = (ROOT / "README.md").read_text("utf-8").replace("](docs/index.md)", "](#all-pages)")
    pages = (ROOT / "docs" / "index.md").read_text("utf-8").replace("# All pages", "## All pages")
    pages = pages.replace("[README](../README.md)", "beginning of this page")
    pages = re.sub(r"\]\(\.\./examples/(notebooks/\w+)\.ipynb\)", r"](\1.md)", pages)
    text = readme.replace("](docs/", "](") + "\n" + pages
    return re.sub(r"\[(\w+)\]\([A-Z]+\.md\)", r"\1", text)


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
