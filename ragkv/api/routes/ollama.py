"""Ollama's API for chat: `/api/tags`, `/api/ps`, `/api/show`, `/api/chat`, `/api/generate` and
`/api/version`.

A request becomes one of /v1/chat/completions, so a model with a collection's name answers from that
collection. What Ollama's clients set for Ollama alone, such as its threads, is ignored and noted in
the report at the end of the answer.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from ragkv import __version__

from ..bodies.chat import ChatRequest
from ..bodies.chat_answer import ChatResponse, Piece
from ..bodies.documents import Strict
from ..chat_completion import ChatCompletion
from ..errors import ApiError, not_found
from ..keys import Principal
from ..service import PrincipalDep, Service, ServiceDep, TenantExecutorDep
from ..sse import Stream
from ..tenants import Tenant
from .models import models_of

router = APIRouter(prefix="/api", include_in_schema=False)

SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)
# Ollama's options, and the fields of /v1/chat/completions that mean the same.
OPTIONS = {
    **dict(zip(SAME, SAME, strict=True)),
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
# These fields would change the answer.
NOT_OFFERED = ("images", "think", "raw", "suffix", "template", "context")

# a piece of text and calls of tools as an answer's fields
Form = Callable[[str, list[dict[str, Any]]], dict[str, Any]]


class OllamaFunction(BaseModel):
    """Which function is called, and how."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(BaseModel):
    """A call of a tool."""

    function: OllamaFunction


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

    def as_chat(self, model_id: str) -> ChatRequest:
        """The same request to /v1/chat/completions. Raises `RequestValidationError` and
        `ApiError`.
        """
        for name in NOT_OFFERED:
            if any((part.model_extra or {}).get(name) for part in (self, *self.messages)):
                raise ApiError(400, f"{name} is not offered here; leave it out.", param=name)
        fields = {
            OPTIONS[name]: value for name, value in (self.options or {}).items() if name in OPTIONS
        }
        if fields.get("max_tokens") in (-1, -2):  # Ollama's words for no limit of the request's own
            del fields["max_tokens"]
        if fields.get("stop") == []:
            del fields["stop"]
        if self.format:
            kind = "json_object" if self.format == "json" else "json_schema"
            schema = {"json_schema": {"schema": self.format}} if kind == "json_schema" else {}
            fields["response_format"] = {"type": kind, **schema}
        fields["model"] = model_id if self.model == f"{model_id}:latest" else self.model
        fields |= {"messages": self._messages(), "tools": self.tools or None}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error

    @property
    def ignored(self) -> list[str]:
        """Notes on what was set and changes nothing."""
        names = (self.options or {}).keys() - OPTIONS.keys() | (self.model_extra or {}).keys()
        return [f"{name} is ignored" for name in sorted(names)]

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
            if functions := [one.function for one in message.tool_calls or ()]:
                waiting = [f"call_{next(numbers)}" for _ in functions]
                said = [
                    {"name": one.name, "arguments": json.dumps(one.arguments)} for one in functions
                ]
                pairs = zip(waiting, said, strict=True)
                made["tool_calls"] = [
                    {"id": id, "type": "function", "function": one} for id, one in pairs
                ]
            if message.role == "tool":
                made |= {
                    "tool_call_id": waiting.pop(0) if waiting else None,
                    "name": message.tool_name,
                }
            found.append(made)
        return found


class ShowRequest(Strict):
    """Which model to show."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(validation_alias=AliasChoices("model", "name"))


@router.get("/version")
async def version() -> dict[str, str]:
    """ragkv's version."""
    return {"version": __version__}


@router.get("/ps")
@router.get("/tags")
async def tags(service: ServiceDep, executor: TenantExecutorDep) -> dict[str, Any]:
    """The models of `/v1/models`, all of which are loaded."""
    return await executor.run(
        lambda tenant: {
            "models": [_described(service, tenant, one.id) for one in models_of(service, tenant)]
        }
    )


@router.post("/show")
async def show(
    body: ShowRequest, service: ServiceDep, executor: TenantExecutorDep
) -> dict[str, Any]:
    """What is known of a model. Raises `ApiError` for one that `/api/tags` does not list."""
    collection = service.collection_of(body.model.removesuffix(":latest"))

    def work(tenant: Tenant) -> dict[str, Any]:
        if collection is not None and tenant.collections.folders.key(collection) is None:
            raise not_found("collection", collection, "model")
        return _described(service, tenant, body.model)

    found = await executor.run(work)
    return {**found, "capabilities": ["completion", "tools"], "template": "", "parameters": ""}


@router.post("/chat")
async def chat(
    body: OllamaRequest, request: Request, service: ServiceDep, principal: PrincipalDep
) -> Response:
    """Answer a chat."""

    def form(text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "message": {
                "role": "assistant",
                "content": text,
                **({"tool_calls": calls} if calls else {}),
            }
        }

    return await _answered(body, request, service, principal, form)


@router.post("/generate")
async def generate(
    body: OllamaRequest, request: Request, service: ServiceDep, principal: PrincipalDep
) -> Response:
    """Answer a prompt."""
    return await _answered(body, request, service, principal, lambda text, _: {"response": text})


async def _answered(
    body: OllamaRequest, request: Request, service: Service, principal: Principal, form: Form
) -> Response:
    """The answer, in lines or whole."""
    completion = ChatCompletion(service, principal, body.as_chat(service.model_id))

    def line(text: str, calls: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        return {"model": body.model, "created_at": now, **form(text, calls), "done": False, **more}

    def last(response: ChatResponse, text: str) -> dict[str, Any]:
        choice = response.choices[0]
        timing = response.ragkv.timing
        usage = response.usage
        made = [call.function for call in choice.message.tool_calls or ()]
        calls = [
            {"function": {"name": one.name, "arguments": json.loads(one.arguments)}} for one in made
        ]
        response.ragkv.notes += body.ignored
        return line(
            text,
            calls,
            done=True,
            done_reason="length" if choice.finish_reason == "length" else "stop",
            # Ollama counts nanoseconds
            total_duration=int(1e9 * (timing.first_token_s + timing.decode_s)),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=int(1e9 * timing.prefill_s),
            eval_count=usage.completion_tokens,
            eval_duration=int(1e9 * timing.decode_s),
            ragkv=response.ragkv.model_dump(),
        )

    completion.check()
    if not (body.messages or body.prompt):  # how clients ask for a model to be loaded
        return JSONResponse(line("", [], done=True, done_reason="load"))
    if not body.stream:
        whole = await service.answer_pool.run_stream(request, completion.events, ChatResponse)
        return JSONResponse(last(whole, whole.choices[0].message.content or ""))
    items = await service.answer_pool.stream(request, completion.events)

    def show(item: Piece | ChatResponse) -> list[str]:
        return [
            json.dumps(line(item.text, []) if isinstance(item, Piece) else last(item, "")) + "\n"
        ]

    return Stream(
        items,
        show,
        lambda error: json.dumps({"error": error.message}) + "\n",
        media_type="application/x-ndjson",
    )


def _described(service: Service, tenant: Tenant, name: str) -> dict[str, Any]:
    """A model, as `/api/tags` and `/api/show` have it."""
    stats = tenant.engine.stats()
    model = tenant.engine.model
    family = stats.architecture
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "size": 0,
        "digest": model.identity.weights,
        "details": {
            "format": "safetensors",
            "family": family,
            "families": [family],
            "quantization_level": stats.dtype,
        },
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": model.adapter.context_length,
        },
    }
