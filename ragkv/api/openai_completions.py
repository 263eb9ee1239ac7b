"""The request and response of /v1/completions: plain texts to continue, without a chat template."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from ragkv.prompt import AnswerOptions

from .bodies.chat import StreamOptions
from .bodies.resources import PrefillReport, ReuseOptions
from .bodies.sampling import SamplingFields
from .bodies.values import Usage, ignored

Text = Annotated[str, StringConstraints(min_length=1)]


def _no_number(value: Any) -> Any:
    """Refuse 0, which equals False in Python."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError("it must be false")  # noqa: TRY004 - pydantic answers it with 400
    return value


def _no_truth_value(value: Any) -> Any:
    """Refuse true, which equals 1 in Python."""
    if isinstance(value, bool):
        raise ValueError("it must be 1")  # noqa: TRY004 - likewise
    return value


class CompletionRequest(SamplingFields):
    """Texts to continue."""

    model: str = Field(description="A model of `GET /v1/models`.", examples=["reader"])
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=128)] = Field(
        description="One text, or several; each is continued as it is.", examples=["Kiralus works as a"]
    )
    stream: bool | None = Field(default=False, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    max_tokens: int | None = Field(default=None, ge=1, description="The most tokens of each; 16 if left out.")
    n: int | None = Field(default=None, ge=1, description="How many continuations of each text; it is prefilled once.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=5,
        description="Return log probabilities, and those of so many most probable tokens.",
    )
    stop: str | list[Text] | None = Field(default=None, description="Texts that end a continuation.")
    echo: Annotated[Literal[False] | None, BeforeValidator(_no_number)] = Field(
        default=None, description="Not offered."
    )
    suffix: None = Field(default=None, description="Not offered.")
    best_of: Annotated[Literal[1] | None, BeforeValidator(_no_truth_value)] = Field(
        default=None, description="Not offered."
    )
    ragkv: ReuseOptions | None = Field(default=None, description="How the prompts' KV is made.")

    user: Any = ignored("user")
    metadata: Any = ignored("metadata")
    cache_prompt: Any = ignored("cache_prompt")
    num_ctx: Any = ignored("num_ctx")
    keep_alive: Any = ignored("keep_alive")

    @property
    def prompts(self) -> list[str]:
        """The texts."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end a continuation."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def engine_options(self) -> AnswerOptions:
        """The engine's options for prefill and sampling."""
        options: AnswerOptions = self.ragkv.engine_options if self.ragkv else {}
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        return {**options, **self.sampling_options, "stop": self.stop_strings, "raw": True}


class CompletionLogprobs(BaseModel):
    """The tokens of a continuation: lists of one length."""

    tokens: list[str] = Field(description="The tokens' texts; a part of a character as `bytes:\\xc3`.")
    token_logprobs: list[float] = Field(description="Their log probabilities.")
    top_logprobs: list[dict[str, float]] = Field(description="The most probable tokens at each place.")
    text_offset: list[int] = Field(description="Where each begins, counted from the first in characters.")

    @classmethod
    def of(cls, entries: list[dict[str, Any]]) -> "CompletionLogprobs":
        """From the entries of `TokenText`."""
        offsets, at = [], 0
        for entry in entries:
            offsets.append(at)
            at += len(entry["token"])
        return cls(
            tokens=[_name(entry) for entry in entries],
            token_logprobs=[entry["logprob"] for entry in entries],
            top_logprobs=[{_name(one): one["logprob"] for one in entry["top_logprobs"]} for entry in entries],
            text_offset=offsets,
        )


def _name(entry: dict[str, Any]) -> str:
    """The token's text; for a part of a character its bytes, because several would have the same text."""
    is_part = "\ufffd" in entry["token"] and entry["bytes"] is not None
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"]) if is_part else str(entry["token"])


class CompletionChoice(BaseModel):
    """A continuation."""

    index: int = Field(description="Its number: those of the first prompt, then those of the next.")
    text: str = Field(description="The continuation.")
    logprobs: CompletionLogprobs | None = Field(default=None, description="Its tokens, if they were asked for.")
    finish_reason: Literal["stop", "length"] = Field(description="length: `max_tokens` ended it.")


class CompletionReport(BaseModel):
    """How the continuations were made."""

    prompts: list[PrefillReport] = Field(description="The prefill of each prompt.")
    notes: list[str] = Field(description="What was ignored of the request.")


class CompletionResponse(BaseModel):
    """Continuations."""

    model_config = ConfigDict(title="Completion")

    id: str = Field(description="The response's id.")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Seconds since the epoch.")
    model: str = Field(description="The model, as the request named it.")
    choices: list[CompletionChoice] = Field(description="The continuations.")
    usage: Usage
    ragkv: CompletionReport
