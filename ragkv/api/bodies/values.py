"""What the endpoints of OpenAI's shape have in common: token counts, log probabilities, and fields that are ignored."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from ragkv.types import Reuse

from .documents import Part

# Fields of other servers and clients that cannot change an answer here, and why.
IGNORED: Mapping[str, str] = {
    "user": "the key says who asks",
    "safety_identifier": "the key says who asks",
    "metadata": "requests are not stored",
    "store": "requests are not stored",
    "service_tier": "all requests are served alike",
    "prompt_cache_key": "KV is found by content",
    "prompt_cache_retention": "KV is found by content",
    "cache_control": "KV is found by content",
    "cache_prompt": "KV is found by content",
    "num_ctx": "the context is the model's",
    "keep_alive": "the model stays loaded",
    "chat_template_kwargs": "the chat template is rendered without arguments",
}


def ignored(name: str) -> Any:
    """A field of `IGNORED`."""
    return Field(default=None, description=f"Accepted and ignored, with a note: {IGNORED[name]}.")


def notes_of(values: Iterable[Part]) -> list[str]:
    """Notes on the fields that were given and are ignored, each once."""
    names = dict.fromkeys(name for part in values for name in IGNORED if getattr(part, name, None))
    return [f"{name} is ignored: {IGNORED[name]}" for name in names]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one of the answers to a request."""

    index: int  # of the answer
    text: str
    logprobs: Sequence[Mapping[str, Any]] = ()  # of its tokens, if they were asked for


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Reused tokens, exact and fused.")


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int = Field(description="Tokens of the prompt, counted once for all its answers.")
    completion_tokens: int = Field(description="Tokens of the answers.")
    total_tokens: int = Field(description="Both together.")
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompts: Sequence[Reuse], answer_tokens: int) -> "Usage":
        """The counts of prompts that were prefilled once each, and of the tokens of all answers to them."""
        tokens = sum(reuse.tokens for reuse in prompts)
        return cls(
            prompt_tokens=tokens,
            completion_tokens=answer_tokens,
            total_tokens=tokens + answer_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(r.exact + r.fused for r in prompts)),
        )


class Alternative(BaseModel):
    """A token and how probable the model found it, before penalties, biases and temperature."""

    token: str = Field(description="The token's text; parts of a character are shown as \ufffd.")
    logprob: float = Field(description="The natural logarithm of its probability.")
    bytes: list[int] | None = Field(description="The token's bytes; null: the tokenizer does not say.")


class TokenLogprobs(Alternative):
    """A token of the answer."""

    top_logprobs: list[Alternative] = Field(description="The most probable tokens at its place.")


class Logprobs(BaseModel):
    """The tokens of an answer."""

    content: list[TokenLogprobs] = Field(description="One for each token.")
    refusal: None = Field(default=None, description="Always null.")
