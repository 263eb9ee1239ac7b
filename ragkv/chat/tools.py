"""Writes tools into a prompt, and finds the calls in an answer.

A chat template that knows tools and results writes them. Otherwise they are described in the system
message, and calls and results are written as `<tool_call>` and `<tool_response>` (docs/api.md).
Calls are found in every form that supported families write: `<tool_call>` (Hermes, Qwen),
`[TOOL_CALLS]` and a list (Mistral), JSON with "parameters" (Llama 3), plain JSON. An answer in none
of these forms is text, and so is one that names no tool of the request.
"""

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragkv.prompt.constraints import CallSyntax, ResponseFormat

# OpenAI's: {"type": "function", "function": {"name", "description", "parameters"}}
Tool = Mapping[str, Any]

MOST_CALLS = 8  # of a constrained answer
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_OPENING_WORDS = ("[TOOL_CALLS]", "<|python_tag|>")
_ARGUMENTS = ("arguments", "parameters")
_ALPHABET = string.ascii_letters + string.digits

INSTRUCTIONS = """You may call these functions. Each line describes one as JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between tags, one pair of tags for each call:
<tool_call>
{{"name": "the name", "arguments": {{"argument": "value"}}}}
</tool_call>
The results come between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str  # JSON
    id: str = ""

    @property
    def as_text(self) -> str:
        """The call where the chat template knows no tools."""
        return (
            f'<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": '
            f"{self.arguments}}}\n</tool_call>"
        )


def instructions(tools: Sequence[Tool]) -> str:
    """The description of `tools` for a system message."""
    return INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )


def response_text(result: str) -> str:
    """The result of a tool where the chat template knows no tools."""
    return f"<tool_response>\n{result}\n</tool_response>"


def syntax_of(chat_template: str | None, knows_tools: bool) -> CallSyntax:
    """The form in which the model was taught to write calls, by its chat template."""
    template = (chat_template or "") if knows_tools else ""
    if not template or "<tool_call>" in template:
        return "tagged"
    if "[TOOL_CALLS]" in template:
        return "list"
    is_named = '"parameters": ' in template or "'parameters'" in template
    return "parameters" if is_named else "arguments"


class FoundCalls(NamedTuple):
    """The calls in an answer."""

    text: str  # around them
    calls: tuple[ToolCall, ...] = ()

    def behind(self, sent: str) -> str:
        """The text that is left to send when the beginning of the answer was sent."""
        if self.text.startswith(sent):
            return self.text[len(sent) :]
        return self.text.removeprefix(sent.strip())


def find_calls(answer: str, names: Sequence[str], finish_reason: str = "stop") -> FoundCalls:
    """The calls of tools with these `names`. An answer that its "length" ended may end in a call:
    it is left out.
    """
    is_cut = finish_reason == "length"
    if not names:
        return FoundCalls(answer)
    if _OPEN in answer:
        return _tagged(answer, names, is_cut)
    bare = answer.strip()
    for word in _OPENING_WORDS:
        bare = bare.removeprefix(word).lstrip()
    values, rest = _values(bare) if bare[:1] in ("{", "[") else ([], bare)
    calls = _calls_of(values, names)
    is_open = is_cut and (rest or bare != answer.strip())
    if len(calls) == len(values) and (_begins_call(rest, names) if is_open else calls and not rest):
        return FoundCalls("", calls)
    half = max(_begun(answer, word) for word in (_OPEN, *_OPENING_WORDS)) if is_cut else 0
    return FoundCalls(answer[:-half].rstrip() if half > 1 else answer)


def _tagged(answer: str, names: Sequence[str], is_cut: bool) -> FoundCalls:
    """The calls between tags, as `find_calls` returns them. A tag inside a JSON string is part of
    the string.
    """
    decoder = json.JSONDecoder()
    around = list[str]()
    calls = list[ToolCall]()
    rest = answer
    while _OPEN in rest:
        before, _, rest = rest.partition(_OPEN)
        around.append(before.strip())
        rest = rest.lstrip()
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            if is_cut and _CLOSE not in rest and rest[:1] in ("", "{"):
                rest = ""
                break
            return FoundCalls(answer)
        if not (found := _calls_of([value], names)):
            return FoundCalls(answer)
        calls += found
        rest = rest[end:].strip().removeprefix(_CLOSE).lstrip()
        if is_cut and any(tag.startswith(rest) for tag in (_OPEN, _CLOSE)):
            rest = ""
    return FoundCalls("\n".join(filter(None, (*around, rest.strip()))), tuple(calls))


def required_form(
    tools: Sequence[Tool], name: str | None, syntax: CallSyntax, parallel: bool
) -> ResponseFormat:
    """The form of an answer that must call a tool: the one of that name, any if it is `None`.
    Raises `SchemaError`.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    schemas = {function["name"]: _closed(function["parameters"]) for function in functions}
    return ResponseFormat.tool_calls(
        schemas, syntax, MOST_CALLS if parallel and name is None else 1
    )


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function without parameters takes no arguments."""
    if parameters.get("properties"):
        return parameters
    return {"additionalProperties": False, **parameters}


class CallFilter:
    """Passes streamed text through until it may be a call."""

    def __init__(self, names: Sequence[str], holds_all: bool = False) -> None:
        """`names` are the tools' names. With `holds_all` the answer is nothing but calls."""
        self._names = names
        self._holds_all = holds_all
        self.sent = ""
        self._text = ""

    def add(self, piece: str) -> str:
        """Add a piece; returns the text that is certainly no call."""
        self._text += piece
        certain = len(self._text)
        if self._names:
            certain = 0 if self._holds_all else may_hold_calls(self._text)
        new = self._text[len(self.sent) : certain]
        self.sent += new
        return new


def may_hold_calls(text: str) -> int:
    """From which character on the beginning of an answer may be calls; its length if
    nothing may.
    """
    bare = text.lstrip()
    if (
        not bare
        or bare[0] in "{["
        or any(word.startswith(bare[: len(word)]) for word in _OPENING_WORDS)
    ):
        return 0
    if (start := text.find(_OPEN)) >= 0:
        return start
    return len(text) - _begun(text, _OPEN)


def _begun(text: str, word: str) -> int:
    """With how many characters of its beginning a word stands at the end of a text."""
    sizes = range(len(word), 0, -1)
    return next((size for size in sizes if text.endswith(word[:size])), 0)


def _values(text: str) -> tuple[list[Any], str]:
    """The JSON values at the beginning of a text, in a list or with semicolons between them; and
    the text behind.
    """
    decoder = json.JSONDecoder()
    values = list[Any]()
    rest = text.removeprefix("[").lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        values.append(value)
        rest = rest[end:].lstrip(" \r\n\t,;]")
    return values, rest


def _begins_call(text: str, names: Sequence[str]) -> bool:
    """Whether a text is the beginning of a call, or whether a call begins with it."""
    said = "".join(text.split())
    kinds = ("", '{"function":', '{"type":"function","function":')
    openings = [f'{kind}{{"name":"{name}"' for kind in kinds for name in names]
    return any(said.startswith(opening) or opening.startswith(said) for opening in openings)


def _calls_of(values: Sequence[Any], names: Sequence[str]) -> tuple[ToolCall, ...]:
    """The calls in JSON values; () unless all of them are calls."""
    calls = []
    for value in values:
        function = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(function, Mapping) or function.get("name") not in names:
            return ()
        given: Any = next((function[key] for key in _ARGUMENTS if key in function), {})
        if not isinstance(given, Mapping):
            return ()
        arguments = json.dumps(given, ensure_ascii=False)
        try:
            arguments.encode()
        except UnicodeEncodeError:  # the model wrote half of a character
            return ()
        # some chat templates accept no other ids
        id = "".join(secrets.choice(_ALPHABET) for _ in range(9))
        calls.append(ToolCall(function["name"], arguments, id))
    return tuple(calls)
