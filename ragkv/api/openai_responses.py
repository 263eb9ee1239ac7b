"""The request and response of /v1/responses: OpenAI's fields, and ragkv's extensions of chat requests."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, model_validator

from ragkv.prompt import MAX_LOGPROBS

from .bodies.chat import not_offered
from .bodies.documents import GivenDocument, Part
from .bodies.resources import AnswerReport, Retrieval, ReuseOptions
from .bodies.response_formats import FormatRequest, NamedSchema
from .bodies.sampling import SamplingFields
from .bodies.tools import Choice, FunctionDefinition, NamedFunction, NamedTool, ToolDefinition
from .bodies.values import TokenLogprobs, Usage, ignored
from .openai_response_items import ITEM_IGNORED, Input

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, values: Any) -> Any:
        """Name the kind of tool that is not offered."""
        if isinstance(values, dict) and values.get("type") != "function":
            raise ValueError(f"tools of the type {str(values.get('type'))[:40]!r} are not offered: only functions are")
        return values

    @property
    def definition(self) -> ToolDefinition:
        """The tool of a chat request."""
        given = {name: getattr(self, name) for name in FunctionDefinition.model_fields}
        return ToolDefinition(type="function", function=FunctionDefinition(**given))


class NamedChoice(NamedFunction):
    """A tool by its name."""

    type: Literal["function"]

    @property
    def choice(self) -> NamedTool:
        """The choice of a chat request."""
        return NamedTool(type="function", function=NamedFunction(name=self.name))


class TextFormat(Part):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="json_object: any JSON object.")
    name: str | None = Field(default=None, max_length=64, description="Accepted and ignored.", examples=["city"])
    description: str | None = ITEM_IGNORED
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="Only with json_schema. One that cannot be kept is refused."
    )
    strict: bool | None = Field(default=None, description="Ignored: every schema is kept strictly.")

    @property
    def response_format(self) -> FormatRequest:
        """The form of a chat request."""
        schema = None if self.schema_ is None else NamedSchema(schema=self.schema_)
        return FormatRequest(type=self.type, json_schema=schema)


class TextOptions(Part):
    """How the text is written."""

    format: TextFormat | None = Field(default=None, description="Left out: text.")
    verbosity: Literal["medium"] | None = Field(default=None, description="Not offered.")


class ResponseStreamOptions(Part):
    """Options of the stream."""

    include_obfuscation: bool | None = ITEM_IGNORED


class ResponseRequest(SamplingFields):
    """An input to answer."""

    model: str = Field(description="A model of `GET /v1/models`.", examples=["reader"])
    input: Input = Field(description="A user's text, or items.", examples=["What is the job of Kiralus?"])
    instructions: str | None = Field(default=None, description="The system text of this response alone.")
    previous_response_id: str | None = Field(
        default=None, max_length=128, description="The stored response whose conversation goes on."
    )
    store: bool | None = Field(default=None, description="false: nothing of it is stored; left out: it is.")
    stream: bool | None = Field(default=False, description="Answer with server-sent events.")
    stream_options: ResponseStreamOptions | None = Field(default=None, description="Only with `stream`.")
    max_output_tokens: int | None = Field(default=None, ge=1, description="The most tokens of the answer.")
    text: TextOptions | None = Field(default=None, description="The form of the answer's text.")
    tools: list[ResponseTool] | None = Field(default=None, max_length=128, description="Functions it may call.")
    tool_choice: Choice | NamedChoice | None = Field(
        default=None, description="required or a name: the answer is calls whose arguments have their schema."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: one call with tool_choice required.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Log probabilities of so many most probable tokens."
    )
    include: list[Literal["message.output_text.logprobs"]] | None = Field(
        default=None, max_length=8, description="Log probabilities of the answer's tokens."
    )
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = Field(default=None, description="Stored with the response and returned.", examples=[{"topic": "jobs"}])
    documents: list[GivenDocument] | None = Field(default=None, description="Documents to answer from.")
    rag: Retrieval | None = Field(
        default=None, description="Documents to find and answer from; the last user message is the query."
    )
    ragkv: ReuseOptions | None = Field(default=None, description="How the prompt's KV is made.")

    user: Any = ignored("user")
    safety_identifier: Any = ignored("safety_identifier")
    service_tier: Any = ignored("service_tier")
    prompt_cache_key: Any = ignored("prompt_cache_key")
    prompt_cache_retention: Any = ignored("prompt_cache_retention")

    background: Any = not_offered(False)
    truncation: Any = not_offered("disabled")
    reasoning: Any = not_offered({}, {"effort": "none"})
    conversation: Any = not_offered()
    prompt: Any = not_offered()
    max_tool_calls: Any = not_offered()
    context_management: Any = not_offered([])
    moderation: Any = not_offered()


class TextAnnotation(BaseModel):
    """A citation, as OpenAI's clients read it."""

    type: Literal["url_citation"] = "url_citation"
    url: str = Field(description="The source's origin, or its document's id.")
    title: str = Field(description="The source's title, or its document's id.")
    start_index: int = Field(description="Start of the marker in the text.")
    end_index: int = Field(description="End of the marker in the text.")


class OutputText(BaseModel):
    """The text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str = Field(description="The text.")
    annotations: list[TextAnnotation] = Field(description="The citations in the text.")
    logprobs: list[TokenLogprobs] = Field(description="Its tokens, if they were asked for.")


class OutputMessage(BaseModel):
    """The answer's text as a message."""

    type: Literal["message"] = "message"
    id: str = Field(description="The message's id.")
    status: Status = Field(description="incomplete: `max_output_tokens` ended it.")
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = Field(description="One text.")


class OutputCall(BaseModel):
    """A call for the client to answer with a `function_call_output`."""

    type: Literal["function_call"] = "function_call"
    id: str = Field(description="The item's id.")
    call_id: str = Field(description="The call's id.")
    name: str = Field(description="The function's name.")
    arguments: str = Field(description="Its arguments as JSON.")
    status: Status = Field(description="Its status.")


class InputTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Reused tokens, exact and fused.")


class OutputTokensDetails(BaseModel):
    """Details of the answer's tokens."""

    reasoning_tokens: int = Field(default=0, description="Always 0.")


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(description="Tokens of the answer.")
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(description="Both together.")

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """The counts of a chat completion."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """An answer, with the request's settings."""

    id: str = Field(description="The response's id.", examples=["resp_0123456789abcdef0123456789abcdef"])
    object: Literal["response"] = "response"
    created_at: int = Field(description="Seconds since the epoch.")
    status: Status = Field(description="incomplete: `max_output_tokens` ended it.")
    error: None = Field(default=None, description="Always null: a failure is an error response.")
    incomplete_details: IncompleteDetails | None = Field(default=None, description="Why it is incomplete.")
    model: str = Field(description="The model, as the request named it.")
    output: list[OutputMessage | OutputCall] = Field(description="A message, calls, or both.")
    usage: ResponseUsage | None = Field(default=None, description="Token counts; null until it is complete.")
    instructions: str | None = Field(description="Of the request.")
    previous_response_id: str | None = Field(description="Of the request.")
    store: bool = Field(description="Whether it is stored.")
    max_output_tokens: int | None = Field(description="Of the request.")
    metadata: dict[str, str] = Field(description="Of the request.")
    temperature: float | None = Field(description="Of the request.")
    top_p: float | None = Field(description="Of the request.")
    top_logprobs: int = Field(description="Of the request.")
    parallel_tool_calls: bool = Field(description="Of the request.")
    tool_choice: Any = Field(description="Of the request.")
    tools: list[dict[str, Any]] = Field(description="Of the request.")
    text: dict[str, Any] = Field(description="Of the request.")
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    ragkv: AnswerReport | None = Field(default=None, description="The report; it is not stored.")


class DeletedResponse(BaseModel):
    """The id of the response that was deleted."""

    id: str = Field(description="What was deleted.")
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
