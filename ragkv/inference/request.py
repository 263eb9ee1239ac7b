"""What a request is, as checked values: its prompt, what it stands behind, and the way its KV is made."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypedDict

from ragkv.config import ReuseMode
from ragkv.fusion import Selector
from ragkv.history import EMPTY, Discard, History, Part, PartKind
from ragkv.types import Chunk, Unset

ChunkLike = Chunk | str | Sequence[int]


class PrefillOptions(TypedDict, total=False):
    """Options of `Engine.prefill` and `Engine.append`. An option that is left out is the config's."""

    ratio: float | Unset | None  # recompute ratio in [0, 1]; None: the loading controller chooses
    selector: str | Selector | None
    reuse: ReuseMode  # "fused", "prefix" (only what is exact) or "none" (full recompute)
    deadline_s: float | None  # counted from the call
    cancel: threading.Event | None  # the request is cancelled once this is set


class AnswerOptions(PrefillOptions, total=False):
    """Options of `Engine.answer` and `Engine.stream`: how the prompt is prefilled, and how the answer is decoded."""

    max_new_tokens: int
    stop: Sequence[str]  # strings that end the answer
    seed: int | None
    on_prefill: Callable[[Any], None] | None  # called with the `Prefill` before the first token
    do_sample: bool  # False: greedy decoding; this and the following are transformers' generation settings
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    min_new_tokens: int


@dataclass(frozen=True, slots=True)
class Past:
    """What a turn is to stand behind."""

    history: History = EMPTY
    discard: str | Discard | None = None  # what goes if it does not fit; None: the config's
    notes: tuple[str, ...] = ()  # what its report should say of it


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as runs of ids, in order."""

    prefix: tuple[int, ...]
    history: History  # as far as it fits
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]  # with the template's tail, and a given answer behind it
    plain: frozenset[int] = frozenset()  # indices of those chunks that are mere text: computed, never stored
    own_prefix: bool = True  # whether `prefix` is the application's, behind which entries were encoded
    parts: tuple[Part, ...] = ()  # what stands behind the history, by what it is
    notes: tuple[str, ...] = ()  # what the report should say of the history
    asked: int = 0  # of `question`, how many ids were asked; the template's follow

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All S ids."""
        return tuple(chain(self.prefix, self.history.token_ids, *self.chunks, self.question))

    @property
    def asked_ids(self) -> tuple[int, ...]:
        """What was asked, behind what was asked and answered before it: no documents."""
        said, at, ids = self.history.token_ids, 0, list[int]()
        for part in self.history.parts:
            if part.kind is not PartKind.CHUNK:
                ids += said[at : at + len(part)]
            at += len(part)
        return (*ids, *self.question[: self.asked])


@dataclass(frozen=True, slots=True)
class How:
    """In which way a prompt's KV is to be made."""

    ratio: float  # recompute ratio, in [0, 1]; if `controlled`, the least: r*
    selector: Selector
    reuse: ReuseMode
    keeps_history: bool = True  # whether history that is not exact is used as it is
    most_left: float | None = None  # the guard's limit: expected deviation left a token; None: no guard
    notes: tuple[str, ...] = ()  # what the gate's verdict changed
    controlled: bool = False  # whether the loading controller chooses the ratio


__all__ = ["AnswerOptions", "ChunkLike", "How", "Past", "PrefillOptions", "Prompt"]
