"""Reads settings from TOML and the environment, and checks them. An unknown key is refused, naming the nearest."""

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

NOT_SETTINGS = ("RAGKV_HOME", "RAGKV_MODEL")  # options of the command line that share the prefix
SERVE_PREFIX = "RAGKV_SERVE_"  # settings of the server, which share it too


class _Text(str):
    """A value from the environment, not yet converted to its setting's type."""

    __slots__ = ()


def toml_values(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file as nested mappings. Raises `ConfigError` if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read settings from {path}: {error}.") from error


def environment_values(environment: Mapping[str, str] | None, prefix: str) -> dict[str, Any]:
    """The variables with that prefix as nested mappings. `__` separates group and setting."""
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for name, text in source.items():
        foreign = name in NOT_SETTINGS or (name.startswith(SERVE_PREFIX) and prefix != SERVE_PREFIX)
        if name.startswith(prefix) and not foreign:
            *groups, leaf = name.removeprefix(prefix).lower().split("__")
            place = values
            for group in groups:
                inner = place.setdefault(group, {})
                if not isinstance(inner, dict):
                    raise ConfigError(f"{group} is a group of settings, not {str(inner)!r}.")
                place = inner
            place[leaf] = _Text(text)
    return values


def build(cls: type[Any], values: Mapping[str, Any], path: str = "") -> Any:
    """A frozen tree of dataclasses from nested mappings. Raises `ConfigError` for an unknown key or a wrong type."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0)
            raise ConfigError(f"Unknown setting {path}{name!s}. Did you mean {path}{near[0]}?")
        arguments[name] = _convert(hints[name], value, f"{path}{name}")
    return cls(**arguments)


def _convert(kind: Any, value: Any, path: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in options and (value is None or (isinstance(value, _Text) and value.lower() in ("", "none"))):
        return None
    if type(None) in options and str not in options and isinstance(value, str) and value.lower() == "none":
        return None  # TOML has no null
    wanted = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} is a group of settings, not {value!r}.")
        return build(typing.cast(type[Any], wanted), value, path=f"{path}.")
    if typing.get_origin(wanted) is tuple:
        return _convert_list(typing.get_args(wanted)[0], value, path)
    if typing.get_origin(wanted) is Mapping:
        kind = typing.get_args(wanted)[1]
        return {name: _convert(kind, item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, _Text):
        value = _from_text(wanted, value, path)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {wanted.__name__}, not {value!r}.")
    return value


def _convert_list(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    """A list of settings: a TOML array, or words separated by commas."""
    if isinstance(value, _Text):
        value = [_Text(word.strip()) for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path} must be a list, not {value!r}.")
    return tuple(_convert(kind, item, f"{path}[{number}]") for number, item in enumerate(value))


def _from_text(wanted: type[Any], text: str, path: str) -> Any:
    if wanted is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{path} must be true or false, not {text!r}.")
    try:
        return wanted(str(text))
    except ValueError as error:
        raise ConfigError(f"{path} must be {wanted.__name__}, not {text!r}.") from error


def at_least(config: Any, **minimums: float) -> None:
    """Raise `ConfigError` if a setting is less than its minimum; `None` is allowed."""
    for name, minimum in minimums.items():
        value = getattr(config, name)
        if value is not None and not value >= minimum:  # refuses NaN too
            raise ConfigError(f"{name} is {value}; it must be at least {minimum}.")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` if the setting `name` has an unknown value."""
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of: {', '.join(known)}.")
