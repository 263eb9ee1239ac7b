"""The form of an answer as a value: what is refused before anything is compiled."""

from typing import Any

import pytest

from ragkv.errors import InputError, SchemaError
from ragkv.prompt.constraints import ResponseFormat, parse


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED = {
    "false": (False, "", "allows nothing"),
    "a list": ([], "", "not list"),
    "options of the compiler": ({"x-guidance": {"lenient": True}}, "/x-guidance", "not accepted"),
    "deep": (nested(40), "/properties/a/properties/a/properties/a/properties/a/...", "64 levels"),
    "very deep": (
        nested(10_000),
        "/properties/a/properties/a/properties/a/properties/a/...",
        "64 levels",
    ),
    "long": ({"const": "x" * 100_001}, "", "100000 characters"),
    "long names": ({"properties": {f"{n:0100}": {} for n in range(1001)}}, "", "100000 characters"),
    "many values": ({"enum": list(range(10_000))}, "", "10000 values"),
    "not JSON": ({"const": {1, 2}}, "", "not JSON"),
    "NaN": ({"const": float("nan")}, "", "not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_beyond_a_limit_is_refused_and_the_error_names_the_part(name: str) -> None:
    schema, pointer, reason = REFUSED[name]
    with pytest.raises(SchemaError, match=reason) as refused:
        ResponseFormat.json_schema(schema)
    assert refused.value.pointer == pointer and pointer in str(refused.value)


def test_ordinary_schemas_are_within_the_limits() -> None:
    many = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "pattern": "^a"} for n in range(50)},
    }
    for schema in (
        many,
        nested(30),
        {"multipleOf": 0.01},
        {"multipleOf": 5000},
        True,
        {"enum": ["x"] * 900},
    ):
        ResponseFormat.json_schema(schema)


def test_openais_response_format_becomes_a_form() -> None:
    schema = {"type": "integer"}
    assert parse(None) is None and parse({"type": "text"}) is None
    assert (
        parse({"type": "json_object"})
        == ResponseFormat.json_object()
        == parse(ResponseFormat.json_object())
    )
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert parse(named) == ResponseFormat.json_schema(schema)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "xml"},
        "json",
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
    ],
)
def test_any_other_response_format_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="response_format"):
        parse(value)
