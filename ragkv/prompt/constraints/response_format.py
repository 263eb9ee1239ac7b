"""The form of an answer, as a value, and the limits of a schema. Pure Python.

A schema may come from a stranger. This module checks its size. `trial.py` bounds the work of
compiling it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from ragkv.errors import InputError, SchemaError

SCHEMA_CHARS = 100_000  # A schema has at most `SCHEMA_CHARS` characters as JSON.
SCHEMA_DEPTH = 64  # Values nest at most `SCHEMA_DEPTH` deep; an object in an object is two levels.
SCHEMA_VALUES = 10_000  # A schema has at most `SCHEMA_VALUES` JSON values.

Path = tuple[str | int, ...]
CallSyntax = Literal["tagged", "list", "parameters", "arguments"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls of tools are written."""

    tools: tuple[tuple[str, str], ...]  # name, and schema of the arguments as JSON
    syntax: CallSyntax  # <tool_call> tags, a list, or bare JSON with this key for the arguments
    most: int  # calls of one answer


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What an answer must look like: JSON that a schema allows. Equal forms share one compiled
    grammar.
    """

    # the schema as JSON, "": calls only; the order of its properties is the order in the answer
    schema: str
    calls: CallFormat | None = None  # calls of tools, which the answer may be instead

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls('{"type": "object"}')

    @classmethod
    def tool_calls(
        cls, tools: Mapping[str, Mapping[str, Any]], syntax: CallSyntax, most: int = 1
    ) -> Self:
        """At least one call and at most `most` of `tools`: the schema of the arguments by name.

        Raises `SchemaError` as `json_schema` does.
        """
        try:
            schemas = [
                (name, cls.json_schema({"type": "object", **schema}).schema)
                for name, schema in tools.items()
            ]
        except SchemaError as error:
            error.param = "tools"
            raise
        return cls(
            "",
            CallFormat(
                tuple(schemas), syntax, 1 if syntax in ("parameters", "arguments") else most
            ),
        )

    def or_calls(self, calls: Self) -> Self:
        """This form, or the calls of `calls`, which `tool_calls` made."""
        return replace(self, calls=calls.calls)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Self:
        """JSON that `schema` allows. Raises `SchemaError` for a schema that is not JSON or exceeds
        a limit.
        """
        if not isinstance(schema, Mapping | bool):
            raise SchemaError(
                "", f"a schema is an object, true or false, not {type(schema).__name__}"
            )
        if schema is False:
            raise SchemaError("", "the schema is false, which allows nothing")
        plain = {} if schema is True else dict(schema)
        _check(plain)
        try:
            return cls(json.dumps(plain, ensure_ascii=False, allow_nan=False))
        except (ValueError, TypeError) as error:
            raise SchemaError("", f"it is not JSON: {error}") from error


def parse(value: Any) -> ResponseFormat | None:
    """The form that OpenAI's `response_format` asks for; `None` for text. Raises `InputError`,
    `SchemaError`.
    """
    if value is None or isinstance(value, ResponseFormat):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat.json_object()
    if kind == "json_schema":
        named = value.get("json_schema")
        if not isinstance(named, Mapping) or named.get("schema") is None:
            raise InputError(
                "response_format: json_schema needs a schema: give json_schema.schema."
            )
        return ResponseFormat.json_schema(named["schema"])
    raise InputError(
        f"response_format is {value!r:.80}; its type must be text, json_object or json_schema."
    )


def pointer(path: Path) -> str:
    """The JSON pointer of a place in a schema; "" for the whole schema."""
    return "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in path)


def _check(schema: dict[str, Any]) -> None:
    """Raise `SchemaError` for a schema that exceeds a limit."""
    if "x-guidance" in schema:
        raise SchemaError("/x-guidance", "options of the compiler are not accepted in a schema")
    chars = 0
    for values, (path, value) in enumerate(_values(schema), 1):
        chars += (len(value) if isinstance(value, str) else 0) + (len(str(path[-1])) if path else 0)
        if len(path) > SCHEMA_DEPTH:
            raise SchemaError(
                pointer(path[:8]) + "/...", f"it is nested more than {SCHEMA_DEPTH} levels deep"
            )
        if values > SCHEMA_VALUES or chars > SCHEMA_CHARS:
            raise SchemaError(
                "", f"it has more than {SCHEMA_VALUES} values or {SCHEMA_CHARS} characters"
            )


def _values(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Every JSON value in a schema with its path, without recursion."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, Mapping):
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [((*path, number), inner) for number, inner in enumerate(value)]
