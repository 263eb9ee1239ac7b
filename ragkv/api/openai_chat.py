"""What /v1/chat/completions takes and gives: OpenAI's fields, our extensions, and a word for what is not offered."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ragkv.config import ReuseMode

from . import schemas
from .errors import ApiError
from .schemas import Id, Part, Retrieval, SelectorName, SessionId, Share, Strict

# Parameters of OpenAI's that are not offered, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "store": (None, False),
    "reasoning_effort": (None, "none"),
    "service_tier": (None, "auto", "default"),
    "verbosity": (None, "medium"),
}


def _neutral(name: str) -> Any:
    """A field that is there to be refused by its name, unless it asks for nothing."""
    return Field(default=None, description="Not offered.", json_schema_extra={"enum": list(_NEUTRAL[name])})


class TextPart(Part):
    """A piece of a message. Only text is taken."""

    type: Literal["text"]
    text: str


class Message(Part):
    """A message. `tool` messages and calls are not offered."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = Field(default=None, description="Taken and not used.")
    refusal: str | None = Field(default=None, description="Taken and not used.")
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = Field(default=None, description="Taken and not used.")

    @property
    def text(self) -> str:
        """What it says."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Part):
    """What a stream has beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = Field(default=None, description="Taken and not used.")


class GivenDocument(Part):
    """A document that comes with the request; its KV is kept for the next time."""

    id: Id | None = None
    title: str | None = Field(default=None, max_length=1000)
    text: str = Field(min_length=1)


class Rag(Retrieval, Part):
    """Documents that are looked for; the last user message is the query."""


class Fusion(Part):
    """How the prompt's KV is made."""

    ratio: Share | None = Field(default=None, description="As of /v1/ask.")
    selector: SelectorName | None = None
    reuse: ReuseMode = "fused"


class ChatRequest(Strict):
    """A conversation to go on with."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    model: str
    messages: list[Message] = Field(min_length=1, max_length=1000)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0, description="Left out or 0: the likeliest token.")
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Of sampling; without temperature, at 1.")
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[Annotated[str, StringConstraints(min_length=1)]] | None = None

    documents: list[GivenDocument] | None = Field(default=None, description="Documents to answer from.")
    rag: Rag | None = Field(default=None, description="Documents to look for and answer from.")
    session_id: SessionId | None = Field(
        default=None, description="The server keeps the conversation: of `messages` the last user turn is taken."
    )
    ragkv: Fusion | None = None

    user: str | None = Field(default=None, description="Taken and not used.")
    metadata: dict[str, Any] | None = Field(default=None, description="Taken and not used.")
    parallel_tool_calls: bool | None = Field(default=None, description="Taken: there are no tools.")
    safety_identifier: str | None = Field(default=None, description="Taken and not used.")
    prompt_cache_key: str | None = Field(default=None, description="Taken: the cache goes by content.")
    prompt_cache_retention: str | None = Field(default=None, description="Taken and not used.")

    n: Any = _neutral("n")
    tools: Any = _neutral("tools")
    tool_choice: Any = _neutral("tool_choice")
    functions: Any = _neutral("functions")
    function_call: Any = _neutral("function_call")
    logprobs: Any = _neutral("logprobs")
    top_logprobs: Any = _neutral("top_logprobs")
    logit_bias: Any = _neutral("logit_bias")
    presence_penalty: Any = _neutral("presence_penalty")
    frequency_penalty: Any = _neutral("frequency_penalty")
    response_format: Any = _neutral("response_format")
    modalities: Any = _neutral("modalities")
    audio: Any = _neutral("audio")
    prediction: Any = _neutral("prediction")
    web_search_options: Any = _neutral("web_search_options")
    store: Any = _neutral("store")
    reasoning_effort: Any = _neutral("reasoning_effort")
    service_tier: Any = _neutral("service_tier")
    verbosity: Any = _neutral("verbosity")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> dict[str, Any]:
        """The engine's settings of sampling; none: the likeliest token."""
        narrowed = self.top_p is not None and self.top_p < 1.0
        temperature = self.temperature if self.temperature is not None else (1.0 if narrowed else 0.0)
        if temperature == 0.0:
            return {}
        return {"do_sample": True, "temperature": temperature, **({"top_p": self.top_p} if self.top_p else {})}


def refuse_unsupported(body: ChatRequest) -> None:
    """Raise `ApiError` for the first parameter that asks for something not offered, by its name."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if not any(type(value) is type(one) and value == one for one in (*neutral, *map(float, _numbers(neutral)))):
            allowed = " or ".join(repr(one) for one in neutral if one is not None)
            hint = f"give {allowed}, or leave it out" if allowed else "leave it out"
            raise ApiError(
                400, f"{name} is not offered by this server: {hint}.", code="unsupported_parameter", param=name
            )


def _numbers(values: tuple[Any, ...]) -> list[int]:
    return [value for value in values if type(value) is int]


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Reused: exact and fused.")


class Usage(BaseModel):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UrlCitation(BaseModel):
    """A source, and where the content names it."""

    url: str
    title: str
    start_index: int
    end_index: int


class Annotation(BaseModel):
    """A citation, as OpenAI's clients read it."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: UrlCitation


class Said(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    annotations: list[Annotation]


class Choice(BaseModel):
    """The one there is."""

    index: Literal[0] = 0
    message: Said
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class Report(BaseModel):
    """How the answer was made."""

    reuse: schemas.Reuse
    timing: schemas.Timing
    prompt: list[schemas.Span]
    citations: list[schemas.Citation]
    sources: list[schemas.Source]
    session_id: str | None


class ChatResponse(BaseModel):
    """An answer."""

    model_config = ConfigDict(title="ChatCompletion")

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    ragkv: Report


__all__ = ["ChatRequest", "ChatResponse", "GivenDocument", "Message", "Report", "Usage", "refuse_unsupported"]
