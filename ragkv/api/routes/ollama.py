"""Ollama's API: `/api/tags`, `/api/ps`, `/api/show`, `/api/chat`, `/api/generate`, `/api/embed`,
`/api/embeddings` and `/api/version`.

A request is translated to one of /v1/chat/completions or /v1/embeddings. So a model with a
collection's name answers from that collection. The server serves one model and never unloads it.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from ragkv import __version__
from ragkv.home import locate
from ragkv.runtime import Check

from ..bodies.chat_answer import AnswerPiece, ChatResponse
from ..bodies.ollama import OllamaEmbedRequest, OllamaRequest, ShowRequest, validated
from ..call import ApiCallDep
from ..errors import not_found
from ..service import Service
from ..sse import Stream
from ..tenants import Tenant
from .chat import ChatCompletion
from .embeddings import EmbeddingsRequest, embed
from .models import models_of

# The version of Ollama whose API this is. Clients refuse to connect to one that is too old.
API_VERSION = "0.12.0"
NEVER = datetime(9999, 12, 31, tzinfo=UTC).isoformat()  # The model stays loaded.

router = APIRouter(prefix="/api", include_in_schema=False)


@router.api_route("/version", methods=["GET", "HEAD"])
async def version() -> dict[str, str]:
    """The version of Ollama's API, and ragkv's own."""
    return {"version": API_VERSION, "ragkv": __version__}


@router.api_route("/tags", methods=["GET", "HEAD"])
@router.get("/ps")
async def tags(call: ApiCallDep) -> dict[str, Any]:
    """The models of `/v1/models`, all of which are loaded."""

    def work(tenant: Tenant, _: Check) -> list[dict[str, Any]]:
        found = models_of(call, tenant)
        return [_described(call.service, tenant, one.id) for one in found]

    return {"models": await call.on_tenant(work)}


@router.post("/show")
async def show(body: ShowRequest, call: ApiCallDep) -> dict[str, Any]:
    """What is known of a model. Raises `ApiError` for one that `/api/tags` does not list."""
    collection = call.collection_of(body.model.removesuffix(":latest"))

    def work(tenant: Tenant, _: Check) -> dict[str, Any]:
        if collection is not None and tenant.collections.folders.key(collection) is None:
            raise not_found("collection", collection, "model")
        return _described(call.service, tenant, body.model)

    found = await call.on_tenant(work)
    return {**found, "capabilities": ["completion", "tools"], "template": "", "parameters": ""}


@router.post("/embed")
@router.post("/embeddings")
async def embeddings(body: OllamaEmbedRequest, call: ApiCallDep) -> dict[str, Any]:
    """Embed texts; `/api/embeddings` has one vector, `/api/embed` a list of them."""
    name = body.model.removesuffix(":latest")
    if not body.input:  # how clients ask for a model to be loaded
        return {"model": body.model, "embeddings": []}
    fields = {"model": name, "input": body.input, "dimensions": body.dimensions}
    made = await embed(validated(EmbeddingsRequest, fields), call)
    vectors = [one.embedding for one in made.data]
    if call.request.url.path.endswith("/embeddings"):
        return {"embedding": vectors[0]}
    return {
        "model": body.model,
        "embeddings": vectors,
        "prompt_eval_count": made.usage.prompt_tokens,
    }


@router.post("/chat")
@router.post("/generate")
async def answer(body: OllamaRequest, call: ApiCallDep) -> Response:
    """Answer a chat or a prompt, in lines or whole."""
    completion = ChatCompletion.of(call, body.as_chat(call.service.model_id))
    is_chat = call.request.url.path.endswith("/chat")

    def line(text: str, calls: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """A piece of text, or calls of tools, as one line of an answer."""
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        said = {"message": message} if is_chat else {"response": text}
        now = datetime.now(UTC).isoformat()
        return {"model": body.model, "created_at": now, **said, "done": False, **more}

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

    if not (body.messages or body.prompt):  # how clients ask for a model to be loaded or unloaded
        reason = "unload" if body.unloads else "load"
        return JSONResponse(line("", done=True, done_reason=reason))
    if not body.stream:
        whole = await call.answer(completion.events, ChatResponse)
        return JSONResponse(last(whole, whole.choices[0].message.content or ""))
    items = await call.stream(completion.events)

    def show(item: AnswerPiece | ChatResponse) -> list[str]:
        return [
            json.dumps(line(item.text) if isinstance(item, AnswerPiece) else last(item, "")) + "\n"
        ]

    return Stream(
        items,
        show,
        lambda error: json.dumps({"error": error.message}) + "\n",
        media_type="application/x-ndjson",
    )


def _described(service: Service, tenant: Tenant, name: str) -> dict[str, Any]:
    """A model, as `/api/tags`, `/api/ps` and `/api/show` have it."""
    stats = tenant.engine.stats()
    model = tenant.engine.model
    family = stats.architecture
    adapter = model.adapter
    weights = list(adapter.model.parameters())
    count = sum(one.numel() for one in weights)
    size = sum(one.numel() * one.element_size() for one in weights)
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(_changed(service), UTC).isoformat(),
        "size": size,
        "size_vram": size if adapter.device.type != "cpu" else 0,
        "expires_at": NEVER,
        "digest": model.identity.weights,
        "context_length": adapter.context_length,
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.1f}B",
            "quantization_level": stats.dtype,
        },
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            "general.parameter_count": count,
            f"{family}.context_length": adapter.context_length,
        },
    }


def _changed(service: Service) -> float:
    """When the model's files were changed, in seconds since the epoch; of a model from the hub,
    when the server started.
    """
    path = Path(locate(service.config.model))
    return path.stat().st_mtime if path.exists() else service.created
