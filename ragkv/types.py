"""The values that callers give and get. Frozen and pure Python. Their repr fits the screen,
whatever they hold.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxtuple = 3
_SHORT.maxstring = 100
_SHORT.maxother = 400


def brief(value: Any) -> str:
    """The repr of a dataclass, cut where a field is long. A class takes it by `__repr__ =
    brief`.
    """
    shown = (f"{one.name}={_SHORT.repr(getattr(value, one.name))}" for one in fields(value))
    return f"{type(value).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a prompt's tokens: a `Chunk`, or a `Text` among chunks. Its ids never change."""

    token_ids: tuple[int, ...]
    text: str = ""
    __repr__ = brief

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Chunk(Piece):
    """A run of tokens that is retrieved, stored and fused as a whole."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    __repr__ = brief


@dataclass(frozen=True, slots=True)
class Excerpt(Chunk):
    """A part of a stored chunk: the tokenizer merged the first or last tokens of the chunk with the
    text around it.

    Its KV is that part of the chunk's; nothing is stored of it alone.
    """

    whole: tuple[int, ...] = ()  # the ids of the stored chunk
    offset: int = 0  # how many of them stand before this part
    __repr__ = brief


@dataclass(frozen=True, slots=True)
class Text(Piece):
    """A run of the prompt among its chunks, such as a heading or a number: always computed, never
    stored.

    No separator stands before it. Without ids it is tokenized with the request: `Text((), "Passage
    2: ")`. The first may be the prompt's opening, in place of the application's prefix; then no
    chunk right behind it is exact.
    """

    opening: bool = False
    __repr__ = brief


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one request went, in seconds."""

    # all other time before the first token, without the search: the turn before, laying out,
    # waiting for the model, and attempts that failed
    queue_s: float = 0.0
    # finding and opening stored KV, waiting for a chunk of another request, and deciding
    lookup_s: float = 0.0
    load_s: float = 0.0  # waiting for layer slices
    fuse_s: float = 0.0  # rotating stored KV and copying it into place
    prefill_s: float = 0.0  # the whole pass over the prompt, load_s and fuse_s included
    # TTFT: from the beginning of the request, before a search of its passages, to the first token
    first_token_s: float = 0.0
    decode_s: float = 0.0  # from the first token to the last
    # tokens of the answer that were proposed because they followed in the prompt, and verified
    drafted: int = 0
    accepted: int = 0  # how many of them were right; each saved a decoding step


@dataclass(frozen=True, slots=True)
class Reuse:
    """How the prompt's S tokens were served. The first four counts are disjoint and sum to S."""

    exact: int = 0  # reused, and equal to what a full prefill computes
    fused: int = 0  # reused as stored: they were computed without the tokens that precede them here
    recomputed: int = 0  # stored, but selected and computed again in the last layer
    # Question, template, text between chunks, the first 64 tokens of a leading chunk, misses and
    # history without KV. Also what is computed sooner than loaded.
    computed: int = 0
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)  # bytes read, by tier
    missed_chunks: int = 0  # chunks without a usable entry
    missed_tokens: int = 0  # tokens of those chunks; their entries are encoded afterwards
    ratio: float = 0.0  # recompute ratio used; 0 if no KV was to be fused
    selector: str = "none"  # selector used; "none" at ratio 0
    compute: float = 1.0  # row-layers computed over a full prefill's, extra passes counted
    notes: tuple[str, ...] = ()  # what else the caller should know: damaged entries, fallbacks
    decision: tuple[str, ...] = ()  # why the loading controller chose this, if it was asked

    @property
    def tokens(self) -> int:
        """S."""
        return self.exact + self.fused + self.recomputed + self.computed


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A run of the prompt's tokens that were served alike. A prompt's spans sum to its `Reuse`."""

    # "prefix", "history", "chunk", "question", "answer" (one that is given with its question), or
    # "template" (the text around and between them)
    kind: str
    start: int  # position of its first token in the prompt
    tokens: int
    state: str  # "exact", "fused" or "computed"
    recomputed_at: tuple[int, ...] = ()  # recomputed tokens of a fused span, counted from its start
    chunk: int | None = None  # index into the request's chunks
    why: str | None = None  # why a chunk is computed instead of reused

    @property
    def recomputed(self) -> int:
        """How many of its tokens were recomputed in the last layer."""
        return len(self.recomputed_at)


@dataclass(frozen=True, slots=True)
class Citation:
    """A place where a chunk contains the answer."""

    chunk: int  # index into the request's chunks
    start: int  # character offsets in the chunk's text
    end: int
    source: str  # the chunk's document, from its metadata; "" if unknown


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How probable the model finds a token: before penalties, biases and temperature."""

    token_id: int
    logprob: float  # natural logarithm
    # the most probable tokens with theirs, the most probable first
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the report of how it was made."""

    text: str
    token_ids: tuple[int, ...]  # generated ids, without the end token
    finish_reason: str  # "stop" (end token or stop string) or "length"
    timing: Timing
    reuse: Reuse
    citations: tuple[Citation, ...] = ()
    spans: tuple[PromptSpan, ...] = ()  # the prompt, run by run
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token, if they were asked for
    __repr__ = brief

    def with_notes(self, *notes: str) -> "Answer":
        """This answer, with `notes` added to its report."""
        return (
            replace(self, reuse=replace(self.reuse, notes=(*self.reuse.notes, *notes)))
            if notes
            else self
        )


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step of a streamed answer."""

    text: str  # what this step adds; may be "" while a character or a stop string is incomplete
    token_id: int | None  # None: the text was held back to the end, and belongs to earlier tokens
    logprob: TokenLogprob | None = None  # of the token, if it was asked for
