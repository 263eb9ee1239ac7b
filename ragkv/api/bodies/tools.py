"""Tools in a chat request, and their calls in its answer: OpenAI's fields."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints
from pydantic_core import from_json

from ragkv.chat import ToolCall

from ..errors import ApiError
from .parts import MessagePart, RequestPart, optional

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Choice = Literal["none", "auto", "required"]


class FunctionDefinition(RequestPart):
    """A function that the model may call."""

    name: ToolName = Field(description="Its name.", examples=["search"])
    description: str | None = optional("What it does; the model reads it.")
    parameters: dict[str, Any] | None = optional("JSON schema of its arguments.")
    strict: bool | None = optional("Ignored: a constrained call is always strict.")


class ToolDefinition(RequestPart):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition

    @property
    def for_prompt(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function = self.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        described = {
            "name": function.name,
            "description": function.description or "",
            "parameters": parameters,
        }
        return {"type": "function", "function": described}


class NamedFunction(RequestPart):
    """A function by its name."""

    name: ToolName = Field(description="Its name.")


class NamedTool(RequestPart):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(MessagePart):
    """A function that was called."""

    name: ToolName = Field(description="Its name.")
    arguments: str = Field(description="Its arguments as JSON.")


class CallBody(MessagePart):
    """A call in an answer, which the client sends back with a `tool` message."""

    id: str = Field(max_length=256, description="The call's id.")
    type: Literal["function"] | None = Field(
        default="function", description="Only functions can be called."
    )
    function: CalledFunction

    @property
    def call(self) -> ToolCall:
        """The call. Raises `ApiError` if its arguments are no JSON object."""
        try:
            arguments = from_json(self.function.arguments or "{}", allow_inf_nan=False)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            message = f"The arguments of the call {self.id[:80]!r} are no JSON object."
            raise ApiError(400, message, param="messages")
        return ToolCall(self.function.name, json.dumps(arguments, ensure_ascii=False), self.id)


def called(calls: Sequence[ToolCall]) -> list[CallBody]:
    """Calls as the response has them."""
    return [
        CallBody(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in calls
    ]


def check_choice(tools: Sequence[ToolDefinition], choice: Choice | NamedTool | None) -> None:
    """Raise `ApiError` for two tools of one name, and for a choice that names no tool of the
    request.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "Two tools have the same name; give each its own.", param="tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = f"tool_choice names {choice.function.name!r}, which is not among the tools."
        raise ApiError(400, message, param="tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is required, but there are no tools.", param="tool_choice")
