"""A request as values: its options, what was asked after all checks, its prompt, and its prefill.

`Request` is frozen: what a caller asked, validated and tokenized. `ActiveRequest` is the one object
that changes while the request is served; it dies with the request.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypedDict

import torch
from transformers import DynamicCache

from ragkv.config import ReuseMode
from ragkv.fusion import Fused, Selector
from ragkv.model import Recording
from ragkv.model.decode.sampling import Sampling
from ragkv.prompt.constraints import ResponseFormat
from ragkv.prompt.history import EMPTY, History, Part
from ragkv.scheduling import Ticket
from ragkv.store import EntryKey
from ragkv.types import Chunk, Excerpt, PromptSpan, Reuse, Timing

if TYPE_CHECKING:
    from .constraints.grammar import Grammar

ChunkLike = Chunk | str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Past:
    """What a turn stands behind."""

    history: History = EMPTY
    notes: tuple[str, ...] = ()  # what the turn's report says about the history


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as runs of token ids, in order."""

    prefix: tuple[int, ...]
    history: History  # as much of it as fits
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]  # with the template's tail, and a given answer behind it
    # indices of chunks that are only text: computed, never stored
    plain: frozenset[int] = frozenset()
    separator: tuple[int, ...] = ()  # computed behind each chunk that no text follows
    # chunks that are parts of stored ones, by index
    excerpts: Mapping[int, Excerpt] = field(default_factory=dict)
    # whether `prefix` is the application's, which entries were encoded behind
    own_prefix: bool = True
    parts: tuple[Part, ...] = ()  # the runs behind the history, by kind
    notes: tuple[str, ...] = ()  # what the report says about the history and the length
    # the most tokens of the answer: those that were asked for, or fewer that fit
    answer_tokens: int = 0
    # the first ids of `question` that are the question itself; the template's follow
    question_tokens: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All S ids."""
        body = (ids for ids, _ in self.body)
        return tuple(chain(self.prefix, self.history.token_ids, *body, self.question))

    @property
    def stored_ids(self) -> tuple[tuple[int, ...], ...]:
        """The ids under which the KV of each chunk is stored."""
        parts = self.excerpts
        return tuple(
            parts[index].whole if index in parts else ids for index, ids in enumerate(self.chunks)
        )

    @property
    def body(self) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """The runs between history and question, each with the index of its chunk; `None`: text,
        which is computed.

        The separator stands behind a chunk and never before the first one, which so is exact behind
        the prefix.
        """
        for index, ids in enumerate(self.chunks):
            is_text = index in self.plain
            yield ids, None if is_text else index
            if self.separator and not is_text and index + 1 not in self.plain:
                yield self.separator, None


@dataclass(frozen=True, slots=True)
class PrefillMethod:
    """How a prompt's KV is made."""

    # recompute ratio in [0, 1]; if the controller chooses it, the least it may choose: r*
    ratio: float
    selector: Selector
    reuse: ReuseMode
    # history that is not exact: "keep", "select" among its tokens, or "recompute" it
    inexact_history: str = "select"
    controlled: bool = False  # whether the loading controller chooses the ratio
    # tokens recomputed at least, whatever the ratio; 0 where the request names its ratio
    floor_tokens: int = 0
    notes: tuple[str, ...] = ()  # what the gate result changed
    named: AbstractSet[str] = frozenset()  # which of "ratio" and "selector" the request names

    @property
    def inexact_use(self) -> str:
        """What history that is not exact is used for: as `inexact_history`, but only where chunks
        are fused, too.
        """
        # so the result always equals a full prefill
        is_full = self.ratio == 1.0 or self.selector.name == "all"
        return self.inexact_history if self.reuse == "fused" and not is_full else "recompute"


@dataclass(frozen=True, slots=True)
class TurnKV:
    """The KV that a turn of a conversation makes, by position. Decoding goes on filling it."""

    record: Recording
    # indices of history blocks that were computed anew, to be stored again
    recomputed_blocks: tuple[int, ...]
    exact_until: int  # tokens from this position on are not exact, or saw tokens that are not
    frequencies: str  # digest of the RoPE frequencies it was made under
    fused: bool  # chunks were fused, and not all of their tokens were recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPrompt:
    """How a prompt was served, wherever that was."""

    reuse: Reuse
    timing: Timing
    spans: tuple[PromptSpan, ...] = ()  # the prompt, run by run; they sum to `reuse`
    # what a conversation may store; None: it keeps the token ids alone
    turn_kv: TurnKV | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(ServedPrompt):
    """A prompt that is ready to decode."""

    token_ids: torch.Tensor  # (S,) int64, CPU
    # L tensors of reused positions recomputed in that layer, int64, CPU
    selected_by_layer: tuple[torch.Tensor, ...]
    logits: torch.Tensor  # (V,) float32, after any scaling or capping
    fused: Fused  # the live KV; `cache` copies it

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
        return self.fused.kv.to_dynamic_cache()


class PrefillOptions(TypedDict, total=False):
    """Options of `Engine.prefill` and `Engine.append`. An option that is left out is the
    config's.
    """

    ratio: float | None  # recompute ratio in [0, 1]; None: the loading controller chooses
    selector: str | Selector | None
    reuse: ReuseMode  # "fused", "prefix" (only what is exact) or "none" (full recompute)
    deadline_s: float | None  # seconds from the call until the request is given up
    cancel: threading.Event | None  # the request is cancelled once this is set
    separator: str | Sequence[int]  # stands behind each chunk that no `Text` follows
    # continue a text: no template follows the question, and the answer keeps the space it begins
    # with
    raw: bool


class AnswerOptions(PrefillOptions, total=False):
    """Options of `Engine.answer` and `Engine.stream`: how the prompt is prefilled, and how the
    answer is decoded.
    """

    max_new_tokens: int  # 64 if left out
    stop: Sequence[str]  # strings that end the answer
    # log probabilities of the tokens, and of so many (0 to 20) most probable ones
    logprobs: int | None
    # the form that the answer must have (docs/structured.md)
    response_format: ResponseFormat | None
    on_prefill: Callable[[ServedPrompt], None] | None  # called before the first token
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
    chunks: tuple[Chunk, ...]
    method: PrefillMethod
    separator: tuple[int, ...] = ()  # stands behind each chunk that no `Text` follows
    given_answer: tuple[int, ...] = ()  # of a turn whose answer is not decoded but given
    deadline_s: float | None = None
    cancel: threading.Event | None = None
    max_new_tokens: int = 0  # 0: nothing is decoded
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    raw: bool = False
    grammar: "Grammar | None" = None  # constrains the answer
    sampling: Sampling = field(default_factory=Sampling)
    on_prefill: Callable[[ServedPrompt], None] | None = None
    # all times of the report count from here
    began: float = field(default_factory=time.perf_counter)


class ActiveRequest:
    """One request while it is served."""

    def __init__(
        self, request: Request, prompt: Prompt, ticket: Ticket, session_id: str = "", *, keep: bool
    ) -> None:
        """`keep`: the turn's KV is recorded, because a conversation stores it."""
        self.request = request
        self.prompt = prompt
        self.ticket = ticket
        self.session_id = session_id
        self.keep = keep
        self.damaged: dict[EntryKey, str] = {}  # entries that were found damaged: the reason by key
        self.lookup_s = 0.0  # spent on finding entries and planning
        self.queue_s = 0.0  # spent on waiting, before the pass
        self.prefill: ServedPrompt  # set when the prompt is prefilled
        self.held = ExitStack()  # closed when the request ends

    def elapsed_s(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.request.began
