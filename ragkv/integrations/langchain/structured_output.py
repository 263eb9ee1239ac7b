"""`with_structured_output`: a chat model whose answers are parsed, because a schema constrains them."""

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragkv.errors import InputError

# `_NAMED` are the keywords whose values are schemas by name, `_OPEN` those beside which an object stays open.
_NAMED = {"properties", "$defs", "definitions", "patternProperties"}
_OPEN = {"allOf", "anyOf", "oneOf", "$ref", "not", "if", "patternProperties", "unevaluatedProperties"}

Method = Literal["json_schema", "json_mode", "function_calling"]


def structured(llm: BaseChatModel, schema: Any, method: Method, include_raw: bool) -> Runnable[Any, Any]:
    """`llm`, constrained to `schema` and parsed; with `include_raw`, a dict of raw, parsed and parsing_error.

    With `function_calling` the answer is one call of a tool that takes `schema`. The other methods constrain the answer
    itself; `json_mode` without a schema allows any JSON object. Raises `InputError`.
    """
    if method not in get_args(Method):
        raise InputError(f"method is {method!r}; it must be one of {', '.join(map(repr, get_args(Method)))}.")
    if schema is None and method != "json_mode":
        raise InputError("with_structured_output needs a schema, unless method is 'json_mode'.")
    shown = {"kwargs": {"method": method}, "schema": schema}  # for traces
    if method == "function_calling":
        tool = convert_to_openai_tool({"title": "answer", **schema} if _is_json_schema(schema) else schema)
        name = str(tool["function"]["name"])
        tool["function"]["parameters"] = _closed(tool["function"]["parameters"])
        bound: Runnable[Any, Any] = llm.bind_tools([tool], tool_choice=name, ls_structured_output_format=shown)
        parser = _call_parser(schema, name)
    else:
        bound = llm.bind(response_format=_response_format(schema), ls_structured_output_format=shown)
        parser = _parser(schema)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _response_format(schema: Any) -> dict[str, Any]:
    """OpenAI's `response_format` for a pydantic class, a TypedDict or a JSON schema."""
    if schema is None:
        return {"type": "json_object"}
    plain = schema if _is_json_schema(schema) else convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": str(plain.get("title", "answer")), "schema": _closed(plain)}}


def _closed(schema: Any) -> Any:
    """The schema, whose objects have no other properties than it names, unless it says that they may.

    An object that several parts of the schema describe stays open: each part would forbid the properties of the others.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            made[name] = {key: _closed(inner) for key, inner in value.items()}
        elif name in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list) and "properties" not in schema:
            made[name] = [_closed(inner) for inner in value]
        elif name in ("items", "additionalProperties"):
            made[name] = _closed(value)
    if "properties" in schema and not schema.keys() & _OPEN:
        made.setdefault("additionalProperties", False)
    return made


def _is_json_schema(schema: Any) -> bool:
    return isinstance(schema, Mapping) and not {"name", "function"} & schema.keys()


def _parser(schema: Any) -> BaseOutputParser[Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return _WholePydantic(pydantic_object=schema)
    return _WholeJson()


def _call_parser(schema: Any, name: str) -> BaseOutputParser[Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return _PydanticCall(tools=[schema], first_tool_only=True)
    return _JsonCall(key_name=name, first_tool_only=True)


class _JsonCall(JsonOutputKeyToolsParser):
    """LangChain's parser gives `None` for an answer without a call; this one refuses it."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The arguments of the call. Raises `OutputParserException` for an answer without one."""
        found = super().parse_result(result, partial=partial)
        return found if partial else _checked(found, result)


class _PydanticCall(PydanticToolsParser):
    """The same for a pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The object. Raises `OutputParserException` for an answer without a call."""
        found = super().parse_result(result, partial=partial)
        return found if partial else _checked(found, result)


def _checked(found: Any, result: Sequence[Generation]) -> Any:
    if found is None:
        message = "The answer holds no whole call. Most likely max_tokens ended it; raise it."
        raise OutputParserException(message, llm_output=result[0].text)
    return found


class _WholeJson(JsonOutputParser):
    """LangChain's parser completes an answer that was cut; this one refuses it."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value. Raises `OutputParserException` for an answer that is not whole."""
        if not partial:
            _check_whole(result[0].text)
        return super().parse_result(result, partial=partial)


class _WholePydantic(PydanticOutputParser[Any]):
    """The same for a pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The object. Raises `OutputParserException` for an answer that is not whole."""
        if not partial:
            _check_whole(result[0].text)
        return super().parse_result(result, partial=partial)


def _check_whole(text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        message = f"The answer is no whole JSON: {error}. Most likely max_tokens ended it; raise it."
        raise OutputParserException(message, llm_output=text) from error
