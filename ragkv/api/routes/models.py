"""/v1/models, as OpenAI has it: the model that answers, and the one that embeds."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel

from ..errors import ApiError, responses
from ..service import Here, Service

router = APIRouter(prefix="/v1/models", tags=["openai"])


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ragkv"


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("", summary="List models", responses=responses())
async def list_models(service: Here) -> ModelList:
    """The model that answers, then the one that embeds, if there is one."""
    return ModelList(data=_models(service))


@router.get("/{model:path}", summary="Show a model", responses=responses(404))
async def show_model(model: Annotated[str, Path(min_length=1)], service: Here) -> Model:
    """One of them, by its id."""
    for one in _models(service):
        if one.id == model:
            return one
    raise ApiError(404, f"There is no model {model[:80]!r} here.", code="model_not_found", param="model")


def _models(service: Service) -> list[Model]:
    embedder = service.loaded.embedder
    names = [service.model_id, *([embedder.name] if embedder else [])]
    return [Model(id=name, created=service.began) for name in names]


__all__ = ["router"]
