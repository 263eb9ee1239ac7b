"""The answer of /v1/chat/completions, its pieces in a stream, its token counts and log
probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .resources import AnswerReport
from .tools import CallBody


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer."""

    text: str
    logprobs: Sequence[Mapping[str, Any]] = ()  # of its tokens, if they were asked for


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Reused tokens, exact and fused.")


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    completion_tokens: int = Field(description="Tokens of the answer.")
    total_tokens: int = Field(description="Both together.")
    prompt_tokens_details: PromptTokensDetails


class Alternative(BaseModel):
    """A token and how probable the model found it, before penalties, biases and temperature."""

    token: str = Field(description="The token's text; parts of a character are shown as \ufffd.")
    logprob: float = Field(description="The natural logarithm of its probability.")
    bytes: list[int] | None = Field(
        description="The token's bytes; null: the tokenizer does not say."
    )


class TokenLogprobs(Alternative):
    """A token of the answer."""

    top_logprobs: list[Alternative] = Field(description="The most probable tokens at its place.")


class Logprobs(BaseModel):
    """The tokens of an answer."""

    content: list[TokenLogprobs] = Field(description="One for each token.")
    refusal: None = Field(default=None, description="Always null.")


class UrlCitation(BaseModel):
    """A source, and where the content names it."""

    url: str = Field(description="The source's origin, or its document on this server.")
    title: str = Field(description="The source's title, or its document's id.")
    start_index: int = Field(description="Start of the marker in the content.")
    end_index: int = Field(description="End of the marker in the content.")


class Annotation(BaseModel):
    """A citation, as OpenAI's clients read it."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: UrlCitation


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="The answer's text; null if it is nothing but calls.")
    tool_calls: list[CallBody] | None = Field(
        default=None, description="Calls for the client to answer."
    )
    refusal: None = Field(default=None, description="Always null.")
    annotations: list[Annotation] = Field(description="The citations in the content.")


class Choice(BaseModel):
    """One answer."""

    index: int = Field(default=0, description="Always 0.")
    message: AssistantMessage
    logprobs: Logprobs | None = Field(
        default=None, description="Its tokens, if they were asked for."
    )
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(
        description="length: `max_tokens` ended it."
    )


class ChatHead(BaseModel):
    """What names an answer."""

    id: str = Field(description="The answer's id.")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Seconds since the epoch.")
    model: str = Field(description="The model, as the request named it.")


class ChatResponse(ChatHead):
    """An answer."""

    model_config = ConfigDict(title="ChatCompletion")

    choices: list[Choice] = Field(description="The one answer.")
    usage: UsageBody
    ragkv: AnswerReport = Field(description="The report of the answer.")


def last_chunks(response: ChatResponse, with_usage: bool) -> list[dict[str, Any]]:
    """The chunks that end the answer and, if requested, the chunk with the usage. The last of them
    has the report.
    """
    choice = response.choices[0]
    chunks = [
        chunk_of(response, with_usage, {"tool_calls": [{"index": number, **call.model_dump()}]})
        for number, call in enumerate(choice.message.tool_calls or ())
    ]
    annotations = [one.model_dump() for one in choice.message.annotations]
    delta = {"annotations": annotations} if annotations else {}
    chunks.append(chunk_of(response, with_usage, delta, choice.finish_reason))
    if with_usage:
        chunks.append(
            {**chunk_of(response, True, {}), "choices": [], "usage": response.usage.model_dump()}
        )
    chunks[-1]["ragkv"] = response.ragkv.model_dump()
    return chunks


def chunk_of(
    answer: ChatHead,
    with_usage: bool,
    delta: dict[str, Any],
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """A chunk of a stream."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": answer.id,
        "object": "chat.completion.chunk",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
        **({"usage": None} if with_usage else {}),
    }
