"""The limits in the OpenAPI document: what this server's settings and its filters accept, as JSON Schema."""

from collections.abc import Iterator, Mapping
from typing import Any

from ragkv.retrieval.filters import COMPARISONS, MAX_CONDITIONS, NAME_CHARS

from .bodies.documents import NO_NUL
from .settings import LimitsConfig, ServeConfig

_JSON: dict[str, Any] = {"$ref": "#/components/schemas/JsonValue"}
_TEXT = {"type": "string", "pattern": NO_NUL}
_JSON_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": _JSON, "propertyNames": _TEXT}
_JSON_VALUE: dict[str, Any] = {
    "description": "A JSON value without NUL in a text.",
    "anyOf": [{"type": ["null", "boolean", "number"]}, _TEXT, {"type": "array", "items": _JSON}, _JSON_OBJECT],
}


def describe_limits(schemas: dict[str, Any], config: ServeConfig) -> None:
    """Write the server's limits into the request bodies among these schemas."""
    limits = config.limits
    schemas["JsonValue"], schemas["Filter"] = _JSON_VALUE, _filter(limits)
    for name, schema in schemas.items():
        if schema.get("additionalProperties") is False:  # only requests refuse unknown fields
            for field, described in schema.get("properties", {}).items():
                _set_maximum(name, field, described, limits)
                if field == "prompt" and "anyOf" in described:
                    _describe_prompts(described, limits)
                if field == "filter":
                    _replace_object(described, {"$ref": "#/components/schemas/Filter"})
                elif field == "metadata" and name.startswith("Document"):
                    _replace_object(described, _JSON_OBJECT)
    _describe_embeddings(schemas["EmbeddingsRequest"]["properties"]["input"], config)


def _set_maximum(schema: str, field: str, described: dict[str, Any], limits: LimitsConfig) -> None:
    """Set the limit of a field, if it has one: a number's maximum, a text's length, or a list's."""
    most = {
        "k": limits.documents,
        "n": limits.answers,
        "max_tokens": limits.max_tokens,
        "max_completion_tokens": limits.max_tokens,
        "max_output_tokens": limits.max_tokens,
        "question": limits.question_chars,
        "query": limits.question_chars,
        "content": limits.question_chars,
        "input": limits.question_chars,
        "instructions": limits.question_chars,
        "output": limits.question_chars,
        "documents": limits.documents,
        "stop": limits.stop_strings,
        "text": limits.question_chars if schema in ("TextPart", "ContentPart") else limits.document_chars,
    }
    keywords = {"integer": "maximum", "array": "maxItems", **({"string": "maxLength"} if field != "stop" else {})}
    if field in most:
        if field in ("content", "input", "output"):
            keywords.pop("array")  # characters, not parts
        for option in _options(described):
            if (keyword := keywords.get(option.get("type", ""))) is not None:
                option[keyword] = most[field]


def _filter(limits: LimitsConfig) -> dict[str, Any]:
    """What a filter may be. Numbers are those of SQLite."""
    comparable = [{"type": "number", "exclusiveMinimum": -(2**63), "exclusiveMaximum": 2**63}, _TEXT]
    value = {"anyOf": [{"type": ["null", "boolean"]}, *comparable]}
    values = {"type": "array", "items": value, "maxItems": limits.filter_values}
    operators: Mapping[str, Any] = {
        "eq": value,
        "ne": value,
        "in": values,
        **{operator: {"anyOf": comparable} for operator in COMPARISONS},
    }
    comparisons = {"type": "object", "properties": operators, "additionalProperties": False, "minProperties": 1}
    return {
        "description": "Conditions on metadata; a passage that is found meets all of them.",
        "type": "object",
        "additionalProperties": {"anyOf": [*value["anyOf"], values, comparisons]},
        "propertyNames": {"pattern": r'^[^"\x00]*$', "maxLength": NAME_CHARS},
        "maxProperties": min(MAX_CONDITIONS, limits.filter_values),
    }


def _describe_prompts(described: dict[str, Any], limits: LimitsConfig) -> None:
    """One text, or as many as there may be answers."""
    for option in described["anyOf"]:
        if option["type"] == "array":
            option["maxItems"] = limits.answers
        for text in (option, option.get("items", {})):
            if text.get("type") == "string":
                text["maxLength"] = limits.question_chars


def _describe_embeddings(described: dict[str, Any], config: ServeConfig) -> None:
    """Texts, and token ids only where this server accepts them."""
    limits, options = config.limits, described["anyOf"]
    if not config.embedding_token_ids:
        options[:] = [option for option in options if "string" in (option["type"], option.get("items", {}).get("type"))]
    for option in options:
        for text in (option, option.get("items", {})):
            if text.get("type") == "string":
                text["maxLength"] = min(limits.question_chars, limits.input_chars)
        if option["type"] == "array":
            option["maxItems"] = limits.inputs


def _replace_object(described: dict[str, Any], details: Mapping[str, Any]) -> None:
    for option in _options(described):
        if option.get("type") == "object":
            option.clear()
            option.update(details)


def _options(described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema of a field, and those of which it may be any."""
    yield described
    yield from described.get("anyOf", described.get("oneOf", ()))
