"""`ragkv config show | check`: which settings hold, and where each comes from."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.config import EngineConfig
from ragkv.errors import ConfigError, MissingExtraError
from ragkv.runtime.setting_values import PREFIX, environment_values, flat, toml_values

from .options import AsJson, Settings, command_group
from .output import console, print_json, print_note

if TYPE_CHECKING:
    from ragkv.api import ServeConfig

config = command_group("Show and check the settings of the commands and the server.", name="config")
HIDDEN = "(a secret, not shown)"
Changed = Annotated[bool, typer.Option("--changed", help="Only settings that differ from their defaults.")]


@config.command()
def show(file: Settings = None, changed: Changed = False, as_json: AsJson = False) -> None:
    """Show every setting: its value, and whether the environment, the file or the default gives it."""
    in_file = dict(flat(toml_values(file))) if file is not None else {}
    in_environment = dict(flat(environment_values(os.environ)))
    rows = []
    for name, value in _settings(file):
        source = _source(name, in_environment, _variable(name)) or _source(name, in_file, str(file)) or "default"
        if not changed or source != "default":
            rows.append({"setting": name, "value": value, "source": source})
    if as_json:
        print_json(rows)
        return
    widths = [max((len(_shown(row[part])) for row in rows), default=0) for part in ("setting", "value")]
    for row in rows:
        cells = (_shown(row["setting"]).ljust(widths[0]), _shown(row["value"]).ljust(widths[1]), _shown(row["source"]))
        console.print("  ".join(cells))


@config.command()
def check(file: Settings = None) -> None:
    """Check the settings of the file and the environment. A wrong one is an error that names it."""
    count = sum(1 for _ in _settings(file))
    console.print(f"{count} settings are valid.")
    with suppress(MissingExtraError):
        from ragkv.api.settings import ServeConfig

        try:
            ServeConfig.gather(file).check_servable()
        except ConfigError as error:
            print_note(f"`ragkv serve` does not start with them. {error}")


def _settings(file: Any) -> Iterator[tuple[str, Any]]:
    """Every setting and its value, the server's too if its packages are installed. Raises `ConfigError`."""
    try:
        from ragkv.api.settings import ServeConfig
    except MissingExtraError as error:
        print_note(f"settings of the server are left out: {error}")
        return _flat(EngineConfig.gather(file))
    return settings_of(ServeConfig.gather(file))


def settings_of(server: "ServeConfig") -> Iterator[tuple[str, Any]]:
    """Every setting of a server and its value, by the name that it has in a file."""
    from ragkv.api.settings import SHARED

    yield from ((name, getattr(server, name)) for name in SHARED)
    yield from _flat(server.engine)
    for field in dataclasses.fields(server):
        if field.name not in (*SHARED, "engine"):
            value = getattr(server, field.name)
            name = f"serve.{field.name}"
            yield from _flat(value, f"{name}.") if dataclasses.is_dataclass(value) else ((name, value),)


def _flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(values):
        value, name = getattr(values, field.name), f"{path}{field.name}"
        if value is not None and not field.repr:
            value = HIDDEN
        yield from _flat(value, f"{name}.") if dataclasses.is_dataclass(value) else ((name, value),)


def _variable(name: str) -> str:
    return PREFIX + name.upper().replace(".", "__")


def _source(name: str, given: Mapping[str, Any], source: str) -> str | None:
    return source if any(one == name or one.startswith(f"{name}.") for one in given) else None


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return {True: "true", False: "false", None: "none", "": '""'}.get(value, str(value))
