"""Tools of a call under LangChain's names, as the dialogue and the engine take them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages.tool import ToolCall as LangChainCall
from langchain_core.messages.tool import tool_call
from langchain_core.utils.function_calling import convert_to_openai_tool

from ragkv.api.chat import Tool, ToolCall, find_calls
from ragkv.errors import InputError


def bound_tools(tools: Sequence[Any], choice: Any) -> dict[str, Any]:
    """The call settings of `bind_tools`. Raises `InputError` for a choice that names none of the tools."""
    converted = [_plain(convert_to_openai_tool(tool)) for tool in tools]
    names = tool_names(converted)
    if isinstance(choice, Mapping):
        choice = choice.get("function", {}).get("name")
    choice = {None: "auto", True: "required", False: "none", "any": "required"}.get(choice, choice)
    if choice not in ("auto", "none", "required", *names):
        raise InputError(f"tool_choice is {choice!r}; it must be auto, any, none or one of {', '.join(names)}.")
    return {"tools": converted, "tool_choice": choice}


def _plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"description": "", "parameters": {"type": "object", "properties": {}}, **tool["function"]}
    function.pop("strict", None)
    return {"type": "function", "function": function}


def tool_names(tools: Sequence[Tool]) -> list[str]:
    """The names of the tools."""
    return [tool["function"]["name"] for tool in tools]


def calls_of(text: str, names: Sequence[str]) -> tuple[str, list[LangChainCall]]:
    """The text of an answer without its calls, and the calls."""
    content, calls = find_calls(text, names) if names else (text, ())
    return content, [tool_call(name=call.name, args=json.loads(call.arguments), id=call.id) for call in calls]


def text_behind(text: str, sent: str, tools: Sequence[Tool]) -> str:
    """What is left to send of an answer whose beginning was sent: nothing if the rest is calls."""
    return "" if find_calls(text, tool_names(tools))[1] else text[len(sent) :]


def dialogue_calls(calls: Sequence[Any]) -> tuple[ToolCall, ...]:
    """LangChain's calls of an earlier answer."""
    return tuple(
        ToolCall(call["name"], json.dumps(call["args"], ensure_ascii=False, default=str), call["id"] or "")
        for call in calls
    )
