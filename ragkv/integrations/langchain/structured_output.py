"""`with_structured_output`: a chat model whose answers are parsed, because a schema constrains
them.
"""

import json
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragkv.errors import InputError

# A schema with one of these is for an object, or for a tool.
_OBJECT = ("properties", "parameters", "function")
Method = Literal["json_schema", "json_mode"]


def structured(
    llm: BaseChatModel, schema: Any, method: Method, include_raw: bool
) -> Runnable[Any, Any]:
    """`llm`, constrained to `schema` and parsed; with `include_raw`, a dict of raw, parsed and
    parsing_error.

    `json_mode` without a schema allows any JSON object. Raises `InputError`.
    """
    if method not in ("json_schema", "json_mode"):
        raise InputError(
            f"method is {method!r}; it must be 'json_schema', 'json_mode' or 'function_calling'."
        )
    if schema is None and method != "json_mode":
        raise InputError("with_structured_output needs a schema, unless method is 'json_mode'.")
    shown = {"kwargs": {"method": method}, "schema": schema}  # for traces
    bound = llm.bind(response_format=_response_format(schema), ls_structured_output_format=shown)
    parser: Runnable[Any, Any] = _WholeJson()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        made: Any = schema
        # pydantic.v1
        parser = parser | (
            made.model_validate if hasattr(made, "model_validate") else made.parse_obj
        )
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _response_format(schema: Any) -> dict[str, Any]:
    """OpenAI's `response_format` for a pydantic class, a TypedDict or a JSON schema.

    LangChain closes it: its objects have the properties that it names and no others. A JSON schema
    that is for no object, or that says itself which properties its object may have, stays as it is.
    """
    if schema is None:
        return {"type": "json_object"}
    given = {"title": "answer", **schema} if isinstance(schema, dict) else {}
    stays = bool(given) and (given.keys().isdisjoint(_OBJECT) or "additionalProperties" in given)
    plain = given if stays else convert_to_json_schema(given or schema, strict=True)
    return {"type": "json_schema", "json_schema": {"name": str(plain["title"]), "schema": plain}}


class _WholeJson(JsonOutputParser):
    """LangChain's parser completes an answer that was cut; this one refuses it."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value. Raises `OutputParserException` for an answer that is not whole."""
        if partial:
            return super().parse_result(result, partial=True)
        try:
            return json.loads(result[0].text)
        except ValueError as error:
            message = (
                f"The answer is no whole JSON: {error}. Most likely max_tokens ended it; raise it."
            )
            raise OutputParserException(message, llm_output=result[0].text) from error
