"""A request as values: its options, the checked and tokenized request, and its prompt's report."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from transformers import DynamicCache

from ragkv.config import ReuseMode
from ragkv.control import Method
from ragkv.fusion import Selector
from ragkv.model import PromptKV, Recording
from ragkv.model.decode.sampling import GREEDY, Sampling
from ragkv.prompt.constraints import ResponseFormat
from ragkv.runtime import Claim
from ragkv.types import Chunk, Piece, PromptSpan, Reuse, Timing

if TYPE_CHECKING:
    from .constraints.grammar import Grammar

ChunkLike = Chunk | str | Sequence[int]
PieceLike = Piece | str | Sequence[int]


@dataclass(frozen=True, slots=True)
class TurnKV:
    """The KV that a turn of a conversation makes, by position. Decoding adds to it."""

    record: Recording
    # indices of history blocks whose KV was lost: it was computed, and is to be stored
    lost_blocks: tuple[int, ...]
    exact_until: int  # tokens from this position on are not exact, or saw tokens that are not
    rope_digest: str  # digest of the RoPE frequencies it was made under
    fused: bool  # whether it has stored KV of chunks that was not recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """The report of a prompt that this model or another server computed."""

    reuse: Reuse
    timing: Timing
    spans: tuple[PromptSpan, ...] = ()  # the prompt, run by run; they sum to `reuse`
    # what a conversation may store; None: it keeps only the token ids
    turn_kv: TurnKV | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompt(PromptReport):
    """A prompt that is ready to decode."""

    token_ids: torch.Tensor  # (S,) int64, CPU
    # L tensors of reused positions that the last pass through that layer recomputed, int64, CPU:
    # those that are recomputed early count above the asked layers
    selected_by_layer: tuple[torch.Tensor, ...]
    logits: torch.Tensor  # (V,) float32, after any scaling or capping
    kv: PromptKV  # the live KV; `cache` copies it

    @property
    def selected(self) -> torch.Tensor:
        """Positions of chunks and history recomputed in the last layer: without what is computed
        anyway. int64, CPU.
        """
        return self.selected_by_layer[-1]

    @property
    def cache(self) -> DynamicCache:
        """A new transformers cache: full layers, S rotated positions each, on sliding
        layers too.
        """
        return dynamic_cache(self.kv)


def dynamic_cache(kv: PromptKV) -> DynamicCache:
    """A cache with S rotated positions in every layer, which shares no memory with `kv`."""
    cache = DynamicCache()
    for layer in range(len(kv.keys)):
        cache.update(*kv.view(layer, kv.length), layer)  # concatenates, hence copies
    return cache


class PrefillOptions(TypedDict, total=False):
    """Options of `Engine.prefill` and `Engine.append`. An option that is left out is the
    config's.
    """

    # recompute ratio in [0, 1]; None: the loading controller chooses, whatever the config says
    ratio: float | None
    selector: str | Selector | None  # None: the config's
    # "fused", "prefix" (exact blocks of earlier prompts with this beginning), "none"
    reuse: ReuseMode
    # The request is given up after so many seconds. They count from the first event that is asked
    # for, or from the call of `answer`, `prefill` or `append`.
    deadline_s: float | None
    cancel: threading.Event | None  # the request is cancelled once this is set
    # The claim of a request that began before, for example with a search, so that its deadline
    # counts from there. It takes the place of `deadline_s` and `cancel`.
    claim: Claim
    separator: str | Sequence[int]  # comes after each chunk that no `Text` follows
    title: str | None  # for the conversation, if it has none yet
    # continue a text: no template follows the question, and the answer keeps the space it begins
    # with
    raw: bool


class AnswerOptions(PrefillOptions, total=False):
    """Options of `Engine.answer` and `Engine.stream`: how the prompt is prefilled, and how the
    answer is decoded.
    """

    max_new_tokens: int  # 64 if left out
    stop: Sequence[str]  # strings that end the answer
    # log probabilities of the tokens, and of this many (0 to 20) most probable ones
    logprobs: int | None
    # the form that the answer must have (docs/api.md)
    response_format: ResponseFormat | None
    # The fields of `ragkv.model.decode.sampling.Sampling`, where each has its range. Greedy unless
    # one of them samples.
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float | None
    min_new_tokens: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked, validated and tokenized."""

    question: tuple[int, ...]
    pieces: tuple[Piece, ...]  # chunks, and `Text` between them
    method: Method
    claim: Claim  # the first token's time counts from its beginning
    # the claim's age when the engine was asked: question and chunks were found and tokenized
    asked_after_s: float = 0.0
    separator: tuple[int, ...] = ()  # comes after each chunk that no `Text` follows
    given_answer: tuple[int, ...] = ()  # the answer of a turn, if it is given and not decoded
    max_new_tokens: int = 0  # 0: nothing is decoded
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    raw: bool = False
    title: str = ""
    grammar: "Grammar | None" = None  # constrains the answer
    sampling: Sampling = GREEDY
