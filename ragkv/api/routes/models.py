"""/v1/models: the language model, alone and with each collection. On request also the embedding
model.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from ..bodies.documents import ID_PATTERN
from ..bodies.resources import Listed
from ..call import ApiCall, ApiCallDep
from ..errors import unknown_model
from ..tenants import Tenant

router = APIRouter(prefix="/v1/models", tags=["openai"])

Kind = Literal["chat", "embedding"]


class Model(BaseModel):
    """A served model."""

    id: str = Field(description="Its name in requests.")
    object: Literal["model"] = "model"
    created: int = Field(description="When the server started, in seconds since the epoch.")
    owned_by: str = Field(default="ragkv", description="Always ragkv.")
    description: str = Field(description="What it answers from.")


@router.get("", summary="List models")
async def list_models(
    call: ApiCallDep,
    type: Annotated[
        Kind, Query(description="chat: what can answer, so that chat clients offer no other.")
    ] = "chat",
) -> Listed[Model]:
    """`model:collection` for each collection, from which it answers; last the language model, which
    answers without documents.
    """
    return Listed(data=await call.on_tenant(lambda tenant, _: models_of(call, tenant, type)))


@router.get("/{model:path}", summary="Show a model")
async def show_model(
    model: Annotated[
        str, Path(pattern=ID_PATTERN, description="The model's id.", examples=["smollm2"])
    ],
    call: ApiCallDep,
) -> Model:
    """One of the models, of either type, by its id."""
    models = await call.on_tenant(
        lambda tenant, _: models_of(call, tenant) + models_of(call, tenant, "embedding")
    )
    for one in models:
        if one.id == model:
            return one
    raise unknown_model(model, ", ".join(repr(one.id) for one in models))


def models_of(call: ApiCall, tenant: Tenant, type: Kind = "chat") -> list[Model]:
    """The models of a tenant. Clients choose the first, so the one without documents is last."""
    service = call.service
    embedder = call.tenants.embedder
    if type == "embedding":
        described = {embedder.name: "Embeds texts."} if embedder else {}
    else:
        described = {
            f"{service.model_id}:{name}": f"Answers from the collection {name}."
            for name in tenant.collections.folders.names()
        }
        described[service.model_id] = "Answers without documents, unless the request has some."
    return [
        Model(id=name, created=service.created, description=text)
        for name, text in described.items()
    ]
