"""/v1/models: OpenAI's endpoint, with the language model and the embedding model."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from ..bodies.documents import ID_PATTERN
from ..errors import unknown_model
from ..service import Service, ServiceDep

router = APIRouter(prefix="/v1/models", tags=["openai"])


class Model(BaseModel):
    """A served model."""

    id: str = Field(description="Its name in requests.")
    object: Literal["model"] = "model"
    created: int = Field(description="When the server started, in seconds since the epoch.")
    owned_by: str = Field(default="ragkv", description="Always ragkv.")


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[Model] = Field(description="The models.")


@router.get("", summary="List models")
async def list_models(service: ServiceDep) -> ModelList:
    """The language model, then the embedding model, if there is one."""
    return ModelList(data=_models(service))


@router.get("/{model:path}", summary="Show a model")
async def show_model(
    model: Annotated[str, Path(pattern=ID_PATTERN, description="The model's id.", examples=["reader"])],
    service: ServiceDep,
) -> Model:
    """One of the models, by its id."""
    models = _models(service)
    for one in models:
        if one.id == model:
            return one
    raise unknown_model(model, " and ".join(repr(one.id) for one in models))


def _models(service: Service) -> list[Model]:
    embedder = service.tenants.embedder
    names = [service.model_id, *([embedder.name] if embedder else [])]
    return [Model(id=name, created=service.created) for name in names]
