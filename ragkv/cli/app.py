"""The commands. The longer ones have a file of their own."""

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ragkv import __version__
from ragkv.config import EngineConfig
from ragkv.runtime import counted
from ragkv.runtime.setting_values import check_names, environment_values

from . import output
from .ask import ask
from .chat import chat
from .docs import docs, search
from .doctor import doctor
from .gate import gate
from .ingest import ingest
from .keys import keys
from .mcp import mcp
from .options import (
    AsJson,
    EngineOptions,
    command_group,
    file_defaults,
    require_index,
    settings_file,
    show_help,
    with_engine_options,
)
from .output import console, print_json
from .profile import profile
from .serve import serve

HELP = {"--help", "--version"}

app = command_group(
    "Answer questions over documents from stored KV: chunks are computed once and fused at "
    "question time.",
    name="ragkv",
    pretty_exceptions_enable=False,
)


def _version(requested: bool) -> None:
    if requested:
        console.print(f"ragkv {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    show_help(context)
    if not HELP & set(sys.argv):
        _check_variables()
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    context.default_map = _defaults(context.command, file_defaults(settings_file()))


def _check_variables() -> None:
    """Raise `ConfigError` for a variable that is no setting: every command says it, also one that
    reads no settings.
    """
    values = environment_values(os.environ)
    of_server = values.pop("serve", {})
    check_names(EngineConfig, values, siblings=("home", "model"))
    if of_server and importlib.util.find_spec("fastapi") is not None:
        from ragkv.api import ServeConfig

        check_names(ServeConfig, of_server, "serve.")


def _defaults(command: Any, values: dict[str, str]) -> dict[str, Any]:
    """The settings file's defaults for the options of every command."""
    commands = getattr(command, "commands", None)
    if commands is None:
        return values
    return {name: _defaults(one, values) for name, one in commands.items()}


@with_engine_options
def gc(options: EngineOptions, as_json: AsJson = False) -> None:
    """Delete the KV of other models, and what no document of the home or of a tenant has."""
    if not any((options.home / folder).is_dir() for folder in ("collections", "tenants")):
        require_index(options.home)
    with options.engine(brief=True) as engine:
        from ragkv.rag import sweep

        freed = engine.entries.gc()
        deleted = sweep(engine, options.home)
    if as_json:
        print_json({"other_models_bytes": freed, "deleted_documents": deleted})
    else:
        of_deleted = counted(deleted, "entry")
        console.print(
            f"Dropped {output.size(freed)} of other models and {of_deleted} of deleted documents."
        )


# in the order in which a user meets them
GROUPS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Ask": (ingest, ask, chat, search),
    "Look": (docs,),
    "Serve": (serve, mcp, keys),
    "Maintain": (doctor, gc, gate, profile),
}
for panel, commands in GROUPS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(command)
