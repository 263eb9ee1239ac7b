"""The request and response of /v1/chat/completions: OpenAI's fields and ragkv's extensions.

Parameters of OpenAI's that this server does not offer are refused by name, unless their value asks for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from ragkv.prompt import MAX_LOGPROBS, AnswerOptions
from ragkv.prompt.constraints import ResponseFormat

from ..errors import ApiError
from .documents import GivenDocument, Part
from .resources import AnswerReport, Retrieval, ReuseOptions, SessionId
from .response_formats import FormatRequest
from .sampling import SamplingFields
from .tools import Call, GivenCall, NamedTool, ToolDefinition
from .tools import Choice as ToolChoice
from .values import Logprobs, Usage, ignored

_IGNORED = "Accepted and ignored."
_NOT_TEXT = {"image": "images", "audio": "audio recordings", "video": "videos", "file": "files"}


def not_offered(*neutral: Any) -> Any:
    """A field that may only be left out, null, or one of the values that ask for nothing."""
    return Field(default=None, description="Not offered.", json_schema_extra={"enum": [None, *neutral]})


def refuse_other_content(content: Any) -> Any:
    """`content` as it is. Raises `ValueError` for a part that is not text."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        for word, many in _NOT_TEXT.items():
            if isinstance(kind, str) and word in kind:
                raise ValueError(f"{many} are not supported: send text")
    return content


class TextPart(Part):
    """A piece of a message. Only text is accepted."""

    type: Literal["text"]
    text: str = Field(description="The text.")
    cache_control: Any = ignored("cache_control")


class Message(Part):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who says it.", examples=["user"]
    )
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(
        default=None, description="The text.", examples=["What is the job of Kiralus?"]
    )
    name: str | None = Field(default=None, description=_IGNORED)
    refusal: str | None = Field(default=None, description=_IGNORED)
    tool_calls: list[GivenCall] | None = Field(default=None, max_length=128, description="Of an assistant.")
    tool_call_id: str | None = Field(default=None, max_length=256, description="Of a tool: the call it answers.")
    function_call: None = Field(default=None, description="Not offered.")
    audio: None = Field(default=None, description="Not offered.")
    annotations: list[Any] | None = Field(default=None, description=_IGNORED)
    cache_control: Any = ignored("cache_control")

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        """Name the kind of content that is not offered."""
        return refuse_other_content(content)

    @property
    def text(self) -> str:
        """The message's text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Part):
    """What a stream contains besides the answer."""

    include_usage: bool = Field(default=False, description="Send a last chunk with the token counts.")
    include_obfuscation: bool | None = Field(default=None, description=_IGNORED)


class ChatRequest(SamplingFields):
    """A conversation to continue."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    model: str = Field(description="A model of `GET /v1/models`.", examples=["reader"])
    messages: list[Message] = Field(
        min_length=1, max_length=1000, description="The conversation. At least one message is the user's."
    )
    stream: bool | None = Field(default=False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    max_tokens: int | None = Field(default=None, ge=1, description="The most tokens of the answer.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The same; give one of the two.")
    stop: str | list[Annotated[str, StringConstraints(min_length=1)]] | None = Field(
        default=None, description="Texts that end the answer; they are not part of it."
    )

    response_format: FormatRequest | None = Field(default=None, description="The form of the answer; left out: text.")
    documents: list[GivenDocument] | None = Field(default=None, description="Documents to answer from.")
    rag: Retrieval | None = Field(
        default=None, description="Documents to find and answer from; the last user message is the query."
    )
    session_id: SessionId | None = Field(
        default=None, description="The server stores the conversation and reads only the last user message."
    )
    ragkv: ReuseOptions | None = Field(default=None, description="How the prompt's KV is made.")

    n: int | None = Field(default=None, ge=1, description="How many answers; the prompt is prefilled once.")
    logprobs: bool | None = Field(default=None, description="Return the log probability of each token of the answer.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="And of so many most probable tokens; needs `logprobs`."
    )

    user: Any = ignored("user")
    safety_identifier: Any = ignored("safety_identifier")
    metadata: Any = ignored("metadata")
    store: Any = ignored("store")
    service_tier: Any = ignored("service_tier")
    prompt_cache_key: Any = ignored("prompt_cache_key")
    prompt_cache_retention: Any = ignored("prompt_cache_retention")
    cache_control: Any = ignored("cache_control")
    cache_prompt: Any = ignored("cache_prompt")
    num_ctx: Any = ignored("num_ctx")
    keep_alive: Any = ignored("keep_alive")
    chat_template_kwargs: Any = ignored("chat_template_kwargs")

    tools: list[ToolDefinition] | None = Field(default=None, max_length=128, description="Functions it may call.")
    tool_choice: ToolChoice | NamedTool | None = Field(
        default=None, description="required or a name: the answer is calls whose arguments have their schema."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: one call with tool_choice required.")
    functions: Any = not_offered([])
    function_call: Any = not_offered("none", "auto")
    modalities: Any = not_offered(["text"])
    audio: Any = not_offered()
    prediction: Any = not_offered()
    web_search_options: Any = not_offered()
    reasoning_effort: Any = not_offered("none")
    verbosity: Any = not_offered("medium")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the answer."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def form(self) -> ResponseFormat | None:
        """The form that the answer must have; raises `ApiError` and `SchemaError`."""
        return None if self.response_format is None else self.response_format.form

    @property
    def engine_options(self) -> AnswerOptions:
        """The engine's options for prefill and sampling."""
        options: AnswerOptions = self.ragkv.engine_options if self.ragkv else {}
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        return {**options, **self.sampling_options, "stop": self.stop_strings, "response_format": self.form}


def refuse_unsupported(body: Part) -> None:
    """Raise `ApiError` 400 for the first parameter that asks for something this server does not offer."""
    for name, field in type(body).model_fields.items():
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or not isinstance(neutral := extra.get("enum"), list):
            continue
        value = getattr(body, name)
        if any(_equal(value, one) for one in neutral):
            continue
        allowed = " or ".join(repr(one) for one in neutral if one is not None)
        hint = f"give {allowed}, or leave it out" if allowed else "leave it out"
        raise ApiError(400, f"{name} is not offered by this server: {hint}.", "unsupported_parameter", name)


def _equal(value: Any, neutral: Any) -> bool:
    """Whether they are equal and of one type: True is not 1. A float may stand for an int."""
    return value == neutral and (type(value) is type(neutral) or (type(value), type(neutral)) == (float, int))


class UrlCitation(BaseModel):
    """A source, and where the content names it."""

    url: str = Field(description="The source's origin, or its document's id.")
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
    tool_calls: list[Call] | None = Field(default=None, description="Calls for the client to answer.")
    refusal: None = Field(default=None, description="Always null.")
    annotations: list[Annotation] = Field(description="The citations in the content.")


class Choice(BaseModel):
    """One answer."""

    index: int = Field(description="Its number, from 0.")
    message: AssistantMessage
    logprobs: Logprobs | None = Field(default=None, description="Its tokens, if they were asked for.")
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(description="length: `max_tokens` ended it.")


class ChatResponse(BaseModel):
    """An answer."""

    model_config = ConfigDict(title="ChatCompletion")

    id: str = Field(description="The answer's id.")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Seconds since the epoch.")
    model: str = Field(description="The model, as the request named it.")
    choices: list[Choice] = Field(description="The answers.")
    usage: Usage
    ragkv: AnswerReport = Field(description="The report of the first answer.")
