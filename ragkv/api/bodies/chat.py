"""The request of /v1/chat/completions: OpenAI's fields and ragkv's extensions.

Parameters of OpenAI's that this server does not offer are refused by name, unless their value asks
for nothing.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, StringConstraints

from ragkv.model.decode.sampling import LEAST_REPETITION, MOST_BIASES, MOST_REPETITION
from ragkv.prompt import MAX_LOGPROBS, AnswerOptions
from ragkv.prompt.constraints import ResponseFormat

from .documents import GivenDocument
from .parts import ClientPart, MessagePart, Strict, optional
from .resources import FormatRequest, RetrievalBody, ReuseOptions, SessionId
from .tools import CallBody, NamedTool, ToolDefinition
from .tools import Choice as ToolChoice

_IGNORED = "Accepted and ignored."

TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Biases = Annotated[
    dict[TokenId, Bias],
    Field(max_length=MOST_BIASES, json_schema_extra={"additionalProperties": False}),
]


class TextPart(MessagePart):
    """A piece of a message. Only text is accepted."""

    type: Literal["text"]
    text: str = Field(description="The text.")


class Message(MessagePart):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who.", examples=["user"]
    )
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = optional(
        "The text.", examples=["Who is it?"]
    )
    name: str | None = optional(_IGNORED)
    refusal: str | None = optional(_IGNORED)
    tool_calls: list[CallBody] | None = optional("Of an assistant.", max_length=128)
    tool_call_id: str | None = optional("Of a tool: the call it answers.", max_length=256)
    annotations: list[Any] | None = optional(_IGNORED)

    @property
    def text(self) -> str:
        """The message's text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def parts(self) -> Iterator[MessagePart]:
        """The message, and everything in it that has fields."""
        yield self
        yield from self.content if isinstance(self.content, list) else ()
        for call in self.tool_calls or ():
            yield call
            yield call.function


class StreamOptions(ClientPart):
    """What a stream contains besides the answer."""

    include_usage: bool = Field(
        default=False, description="Send a last chunk with the token counts."
    )
    include_obfuscation: bool | None = optional(_IGNORED)


class SamplingFields(Strict):
    """How tokens are chosen. The ranges are those of the engine's `Sampling`, which has
    the rules.
    """

    temperature: float | None = optional("Above 0: samples. 0: greedy.", ge=0.0, le=2.0)
    top_p: float | None = optional("Below 1: samples.", gt=0.0, le=1.0)
    top_k: int | None = optional("Above 0: samples, the likeliest tokens only.", ge=0, lt=2**31)
    min_p: float | None = optional("Above 0: samples.", ge=0.0, le=1.0)
    seed: int | None = optional("The same seed samples the same answer.", ge=-(2**63), lt=2**63)
    presence_penalty: float | None = optional(
        "Subtracted from the logits of tokens in the answer.", ge=-2.0, le=2.0
    )
    frequency_penalty: float | None = optional(
        "The same, each time that it has the token.", ge=-2.0, le=2.0
    )
    repetition_penalty: float | None = optional(
        "Divides the logits of tokens of prompt and answer.",
        ge=LEAST_REPETITION,
        le=MOST_REPETITION,
    )
    logit_bias: Biases | None = optional(
        "Added to the logits of these token ids.", examples=[{"5": 1.0}]
    )


class ChatRequest(ClientPart, SamplingFields):
    """A conversation to continue."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    model: str = Field(description="A model of `GET /v1/models`.", examples=["smollm2"])
    messages: list[Message] = Field(
        min_length=1, max_length=1000, description="One at least is the user's."
    )
    stream: bool | None = Field(default=False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = optional("Only with `stream`.")
    max_tokens: int | None = optional("The most tokens of the answer.", ge=1, lt=2**63)
    max_completion_tokens: int | None = optional("The same; give one of the two.", ge=1, lt=2**63)
    stop: (
        str
        | Annotated[list[Annotated[str, StringConstraints(min_length=1)]], Field(max_length=4)]
        | None
    ) = optional("Texts that end the answer; they are not part of it.")

    response_format: FormatRequest | None = optional("The form of the answer; left out: text.")
    documents: list[GivenDocument] | None = optional("Documents to answer from.")
    rag: RetrievalBody | None = optional(
        "Documents to find and answer from; the last user message is the query."
    )
    session_id: SessionId | None = optional(
        "The server stores the conversation and reads only the last user message."
    )
    ragkv: ReuseOptions | None = optional("How the prompt's KV is made.")

    n: Literal[1] | None = optional("One answer to a request.")
    logprobs: bool | None = optional("Return the log probability of each token of the answer.")
    top_logprobs: int | None = optional(
        "How many of the most probable tokens to return as well; needs `logprobs`.",
        ge=0,
        le=MAX_LOGPROBS,
    )

    tools: list[ToolDefinition] | None = optional("Functions it may call.", max_length=128)
    tool_choice: ToolChoice | NamedTool | None = optional(
        "required, or a name: the answer is calls of the schema."
    )
    parallel_tool_calls: bool | None = optional("false: one call with tool_choice required.")

    def parsed_form(self) -> ResponseFormat | None:
        """The form that the answer must have; raises `ApiError` and `SchemaError`."""
        return None if self.response_format is None else self.response_format.form

    @property
    def engine_options(self) -> AnswerOptions:
        """The engine's options for prefill and sampling, without the answer's form."""
        options: AnswerOptions = self.ragkv.engine_options if self.ragkv else {}
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        sampling = self.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)
        if self.logit_bias is not None:
            sampling["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return {
            **options,
            **cast("AnswerOptions", sampling),
            "stop": tuple(stop),
        }
