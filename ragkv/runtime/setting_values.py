"""The values of settings: read from a TOML file and the environment, merged, and built into frozen
dataclasses.

One schema serves the library, the commands and the server (docs/reference/settings.md). Pure
Python.
"""

import dataclasses
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import ConfigError

T = TypeVar("T")
_FIXED = "fixed"  # marks the fields of `fixed`
PREFIX = "RAGKV_"  # begins the environment variables of settings
FILE_VARIABLE = "RAGKV_CONFIG"  # names the settings file, for commands
# The variables that Kubernetes sets in every pod for a service whose name is
# `ragkv` or begins with `ragkv-`.
_KUBERNETES_NAME = re.compile(
    r"RAGKV(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9]+)*|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://.+:\d+")


class Default(str):
    """The default of a setting that a home may keep: equal to the same text, but told from it.

    A setting that was given, by whatever way, is a plain `str`, also if it equals its default.
    """

    __slots__ = ()


def fixed(default: T) -> T:
    """The value of a field that is no setting: nobody needs another one, but code, such as a test
    with small cases, may give it.
    """
    return dataclasses.field(default=default, metadata={_FIXED: True})


def is_setting(field: dataclasses.Field[Any]) -> bool:
    """Whether files, the environment and flags may set a field."""
    return _FIXED not in field.metadata


class _Text(str):
    """A value from the environment, not yet converted to its setting's type."""

    __slots__ = ()


def toml_values(path: str | Path) -> dict[str, Any]:
    """The values of a TOML file as nested mappings. Raises `ConfigError` if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read settings from {path}: {error}.") from error


def environment_values(environment: Mapping[str, str]) -> dict[str, Any]:
    """The variables with the prefix as nested mappings: `RAGKV_STORE__CODEC` is `codec` in the
    group `store`.
    """
    values: dict[str, Any] = {}
    for name, text in environment.items():
        is_setting = name.startswith(PREFIX) and name != FILE_VARIABLE
        if is_setting and not _is_of_kubernetes(name, text):
            *groups, leaf = name.removeprefix(PREFIX).lower().split("__")
            place = values
            for group in groups:
                inner = place.setdefault(group, {})
                if not isinstance(inner, dict):
                    raise ConfigError(f"{group} is a group of settings, not {str(inner)!r}.")
                place = inner
            place[leaf] = _Text(text)
    return values


def _is_of_kubernetes(name: str, text: str) -> bool:
    """Whether Kubernetes set the variable: `RAGKV_SERVICE_HOST`, `RAGKV_PORT_8000_TCP`, or
    `RAGKV_PORT` with a URL.
    """
    is_port = (
        name.endswith("_PORT") and "__" not in name and _KUBERNETES_URL.fullmatch(text) is not None
    )
    return is_port or _KUBERNETES_NAME.fullmatch(name) is not None


def gather(file: str | Path | None, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file's values, overridden by the environment's (default: the process's), as nested
    mappings.
    """
    values = toml_values(file) if file is not None else {}
    return overlay(values, environment_values(os.environ if environment is None else environment))


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping `below`, overridden by the values of `above`."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        merged[name] = (
            overlay(inner, value)
            if isinstance(inner, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested mappings, each with its name: `fusion.ratio`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def build(
    cls: type[Any],
    values: Mapping[str, Any],
    path: str = "",
    siblings: tuple[str, ...] = (),
    *,
    in_code: bool = False,
) -> Any:
    """A frozen tree of dataclasses from nested mappings. Raises `ConfigError` for an unknown key or
    a wrong type.

    `siblings` are names that are known at the same place but are not of `cls`: an error may suggest
    them. Fixed values are refused, unless the values come from code (`in_code`).
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{path.removesuffix('.') or 'A config'} is a group of settings, not {values!r:.80}."
        )
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        _check_known(cls, name, value, path, siblings, in_code)
        arguments[name] = _convert(hints[name], value, f"{path}{name}", in_code)
    return cls(**arguments)


def check_names(
    cls: type[Any], values: Mapping[str, Any], path: str = "", siblings: tuple[str, ...] = ()
) -> None:
    """Raise `ConfigError` for a name in nested mappings that is no setting of `cls`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path.removesuffix('.')} is a group of settings, not {values!r:.80}.")
    hints = typing.get_type_hints(cls)
    for name, value in values.items():
        if name in siblings:
            continue
        _check_known(cls, name, value, path, siblings, in_code=False)
        options = typing.get_args(hints[name]) or (hints[name],)
        group = next((one for one in options if dataclasses.is_dataclass(one)), None)
        if isinstance(group, type) and isinstance(value, Mapping):
            check_names(group, value, f"{path}{name}.")


def _check_known(
    cls: type[Any], name: str, value: Any, path: str, siblings: tuple[str, ...], in_code: bool
) -> None:
    hints = typing.get_type_hints(cls)
    known = {one.name: one for one in dataclasses.fields(cls)}
    if name in known:
        if not (in_code or is_setting(known[name])):
            raise ConfigError(
                f"{path}{name} is not a setting: it is always {known[name].default!r}. Remove it."
            )
        return
    settings = {one: hints[one] for one, field in known.items() if is_setting(field)}
    meant = f"{path}{_nearest(str(name), {**settings, **dict.fromkeys(siblings)})}"
    leaves = list(flat({name: value}, path))
    if leaves and all(isinstance(one, _Text) for _, one in leaves):
        raise ConfigError(
            f"Unknown environment variable {_variable(leaves[0][0])}. Did you mean "
            f"{_variable(meant)}? Unset it otherwise."
        )
    raise ConfigError(f"Unknown setting {path}{name!s}. Did you mean {meant}?")


def _variable(setting: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{setting.upper().replace('.', '__')}"


def _nearest(name: str, hints: Mapping[str, Any]) -> str:
    """The known name that is most like `name`; `fusion_ratio` is taken for `fusion.ratio`."""
    for group, kind in hints.items():
        if name.startswith(f"{group}_") and dataclasses.is_dataclass(kind):
            return f"{group}.{name.removeprefix(f'{group}_')}"
    return difflib.get_close_matches(name, list(hints), n=1, cutoff=0)[0]


def _convert(kind: Any, value: Any, path: str, in_code: bool) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in options and (
        value is None or (isinstance(value, _Text) and value.lower() in ("", "none"))
    ):
        return None
    if (
        type(None) in options
        and str not in options
        and isinstance(value, str)
        and value.lower() == "none"
    ):
        return None  # TOML has no null
    wanted = next(option for option in options if option is not type(None))
    if dataclasses.is_dataclass(wanted):
        if isinstance(value, typing.cast(type[Any], wanted)):
            return value
        return build(typing.cast(type[Any], wanted), value, path=f"{path}.", in_code=in_code)
    if typing.get_origin(wanted) is tuple:
        return _convert_list(typing.get_args(wanted)[0], value, path, in_code)
    if typing.get_origin(wanted) is Mapping:
        kind = typing.get_args(wanted)[1]
        return {
            name: _convert(kind, item, f"{path}.{name}", in_code) for name, item in value.items()
        }
    if isinstance(value, _Text):
        value = _from_text(wanted, value, path)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {wanted.__name__}, not {value!r}.")
    return value


def _convert_list(kind: Any, value: Any, path: str, in_code: bool) -> tuple[Any, ...]:
    """A list of settings: a TOML array, or words separated by commas."""
    if isinstance(value, _Text) and value.lstrip().startswith("["):
        try:
            value = tomllib.loads(f"list = {value}")["list"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{path} must be words separated by commas or a TOML array, not {value!r}."
            ) from error
    elif isinstance(value, _Text):
        value = [_Text(word.strip()) for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path} must be a list, not {value!r}.")
    return tuple(
        _convert(kind, item, f"{path}[{number}]", in_code) for number, item in enumerate(value)
    )


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
