"""Requests of Ollama's clients, as requests to ragkv's own endpoints.

What clients set for Ollama alone, such as its threads, is ignored and noted in the report at the
end of the answer.
"""

import json
from itertools import count
from typing import Any, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from ..errors import ApiError
from .chat import ChatRequest, SamplingFields
from .parts import MAX_NOTES, Strict

Body = TypeVar("Body", bound=BaseModel)

# Ollama's options, and the fields of /v1/chat/completions that mean the same.
OPTIONS = {name: name for name in ("stop", *SamplingFields.model_fields)} | {
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
# These fields would change the answer.
NOT_OFFERED = ("images", "think", "raw", "suffix", "template", "context")


def validated(kind: type[Body], fields: dict[str, Any]) -> Body:
    """A request of another endpoint. Raises `RequestValidationError`, answered with 400."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


class OllamaFunction(BaseModel):
    """Which function is called, and how."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(BaseModel):
    """A call of a tool."""

    function: OllamaFunction

    def with_id(self, id: str) -> dict[str, Any]:
        """The call in OpenAI's form."""
        arguments = json.dumps(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}


class OllamaMessage(BaseModel):
    """A message."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = Field(default=None, validation_alias=AliasChoices("tool_name", "name"))


class OllamaRequest(Strict):
    """A request to `/api/chat`, which has messages, or to `/api/generate`, which has a prompt."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    messages: list[OllamaMessage] = Field(default=[], max_length=1000)
    tools: list[Any] | None = None
    prompt: str = ""
    system: str = ""
    keep_alive: float | str | None = None

    def as_chat(self, model_id: str) -> ChatRequest:
        """This request as one to /v1/chat/completions. Raises `RequestValidationError` and
        `ApiError`.
        """
        for name in NOT_OFFERED:
            if any((part.model_extra or {}).get(name) for part in (self, *self.messages)):
                raise ApiError(400, f"{name} is not offered here; leave it out.", param=name)
        fields = {
            OPTIONS[name]: value for name, value in (self.options or {}).items() if name in OPTIONS
        }
        limit = fields.get("max_tokens")
        if (
            isinstance(limit, int) and limit <= 0
        ):  # Ollama's words for no limit of the request's own
            del fields["max_tokens"]
        if fields.get("stop") == []:
            del fields["stop"]
        if self.format:
            schema = {"type": "json_schema", "json_schema": {"schema": self.format}}
            is_any = self.format == "json"
            fields["response_format"] = {"type": "json_object"} if is_any else schema
        fields["model"] = model_id if self.model == f"{model_id}:latest" else self.model
        fields |= {"messages": self._messages(), "tools": self.tools or None}
        return validated(ChatRequest, fields)

    @property
    def unloads(self) -> bool:
        """Whether a request without a question asks that the model be unloaded."""
        return str(self.keep_alive).rstrip("smh") in ("0", "0.0")

    @property
    def ignored(self) -> list[str]:
        """Notes on what was set and changes nothing."""
        names = (self.options or {}).keys() - OPTIONS.keys() | (self.model_extra or {}).keys()
        for message in self.messages:
            names |= (message.model_extra or {}).keys()
        return [f"{name[:80]} is ignored" for name in sorted(names)[:MAX_NOTES]]

    def _messages(self) -> list[dict[str, Any]]:
        """The messages in OpenAI's form: arguments are text, and calls have ids, which the results
        take in order.
        """
        if not self.messages:
            system = [{"role": "system", "content": self.system}] if self.system else []
            return [*system, {"role": "user", "content": self.prompt}]
        found = []
        numbers = count()
        waiting = list[str]()
        for message in self.messages:
            made: dict[str, Any] = {"role": message.role, "content": message.content}
            if calls := [one.with_id(f"call_{next(numbers)}") for one in message.tool_calls or ()]:
                waiting = [call["id"] for call in calls]
                made["tool_calls"] = calls
            if message.role == "tool":
                made |= {
                    "tool_call_id": waiting.pop(0) if waiting else None,
                    "name": message.tool_name,
                }
            found.append(made)
        return found


class OllamaEmbedRequest(Strict):
    """A request to `/api/embed`, which has `input`, or to `/api/embeddings`, which has `prompt`."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[str] = Field(default=[], validation_alias=AliasChoices("input", "prompt"))
    dimensions: int | None = None


class ShowRequest(Strict):
    """Which model to show."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(validation_alias=AliasChoices("model", "name"))
