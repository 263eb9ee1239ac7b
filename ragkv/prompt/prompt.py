"""A prompt as runs of token ids: prefix, history, chunks with the text between them, question.

The runs are concatenated as ids. No text is tokenized again, so a chunk has the same ids at any
place. History comes before the chunks, so that it is an exact prefix. A `Task` is a request with
its prompt, which dies with the request.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count, zip_longest

from ragkv.config import SessionConfig
from ragkv.errors import InputError, PromptTooLongError
from ragkv.prompt.history import Block, History, fitted
from ragkv.runtime import Claim
from ragkv.types import Chunk, Excerpt, Piece, Text

from .request import Request
from .template import TemplateRuns

# If the answer that was asked for does not fit even without history, so many of its tokens are kept
# free, and history gets the rest.
LEAST_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """The runs of one prompt, in order."""

    prefix: tuple[int, ...]
    pieces: tuple[Piece, ...]  # chunks, and `Text` between them
    tail: tuple[int, ...]  # the question, the rest of the template, then a given answer
    history: History | None = None  # of its conversation, cut to fit; None: it has none
    separator: tuple[int, ...] = ()  # computed after each chunk that no text follows
    own_prefix: bool = True  # whether `prefix` is the application's, with which entries are made
    notes: tuple[str, ...] = ()  # what the report says about the history and the length
    answer_tokens: int = 0  # the most tokens of the answer that were asked for, or that fit
    question_tokens: int = 0  # the first ids of `tail`: those of the question
    given_tokens: int = 0  # the last ids of `tail`: those of a given answer
    chunks: tuple[Chunk, ...] = field(init=False)  # those among `pieces`
    past_ids: tuple[int, ...] = field(init=False)  # the ids of the history
    token_ids: tuple[int, ...] = field(init=False)  # all S ids

    def __post_init__(self) -> None:
        past_ids = () if self.history is None else self.history.token_ids
        body = (ids for ids, _ in self.body)
        token_ids = tuple(chain(self.prefix, past_ids, *body, self.tail))
        object.__setattr__(self, "chunks", chunks_among(self.pieces))
        object.__setattr__(self, "past_ids", past_ids)
        object.__setattr__(self, "token_ids", token_ids)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the history."""
        return () if self.history is None else self.history.blocks

    @property
    def body_start(self) -> int:
        """The position behind prefix and history."""
        return len(self.prefix) + len(self.past_ids)

    @property
    def question_end(self) -> int:
        """The position after the question itself, where the template goes on."""
        return len(self.token_ids) - len(self.tail) + self.question_tokens

    @property
    def given_start(self) -> int:
        """The position where the given answer begins; the end if none is given."""
        return len(self.token_ids) - self.given_tokens

    @property
    def body(self) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """The runs between history and question, each with its index in `chunks`; `None` is text.

        The separator comes after a chunk and never before the first one.
        """
        numbers = count()
        for piece, after in zip_longest(self.pieces, self.pieces[1:]):
            if isinstance(piece, Text):
                yield piece.token_ids, None
                continue
            yield piece.token_ids, next(numbers)
            if self.separator and not isinstance(after, Text):
                yield self.separator, None


@dataclass(frozen=True, slots=True)
class Task:
    """A request with its prompt."""

    request: Request
    prompt: Prompt
    session_id: str = ""  # of its conversation; "" if it belongs to none
    adds_turn: bool = False  # whether its conversation stores the KV that it makes

    @property
    def claim(self) -> Claim:
        """The request's claim on the model."""
        return self.request.claim


def chunks_among(pieces: Iterable[Piece]) -> tuple[Chunk, ...]:
    """The chunks, without the `Text` among them: spans and citations give the index into these."""
    return tuple(piece for piece in pieces if isinstance(piece, Chunk))


def stored_ids(chunk: Chunk) -> tuple[int, ...]:
    """The ids under which a chunk's KV is stored."""
    return chunk.whole if isinstance(chunk, Excerpt) else chunk.token_ids


def lay_out(
    request: Request,
    history: History | None,
    runs: TemplateRuns,
    context_length: int,
    settings: SessionConfig,
) -> Prompt:
    """The prompt of a request after its history (CachedAttention section 3.4).

    History is cut until it and the answer fit the context; an answer that does not fit even without
    history is cut to what fits. Raises `PromptTooLongError` if no token of an answer fits.
    """
    alone = _without_history(request, runs)
    asked = request.max_new_tokens
    length = len(alone.token_ids)
    fits = length + asked <= context_length
    others = length + (asked if fits else min(asked, LEAST_ANSWER_TOKENS))
    truncated = None
    if history is not None:
        if len(history) > (history_room := context_length - others):
            history, truncated = fitted(history, history_room, settings)
        length += len(history)
    if not length:
        raise InputError("The prompt is empty: no prefix, chunk or question.")
    check_length(length, min(asked, 1), context_length)
    answer_room = asked if fits else context_length - length
    cut = (
        None
        if fits
        else f"the answer may have {answer_room} tokens, not {asked}: the context is {context_length}"
    )
    notes = tuple(filter(None, (truncated, cut)))
    return replace(alone, history=history, notes=notes, answer_tokens=answer_room)


def check_length(length: int, answer_tokens: int, context_length: int) -> None:
    """Raise `PromptTooLongError` if the tokens and an answer do not fit the context."""
    if length + answer_tokens > context_length:
        raise PromptTooLongError(
            f"The prompt has {length} tokens and needs room for {answer_tokens} of an answer; the "
            f"model's context is {context_length}. Give fewer or shorter chunks."
        )


def _without_history(request: Request, runs: TemplateRuns) -> Prompt:
    pieces = request.pieces
    prefix = () if request.raw else runs.before_documents
    if pieces and isinstance(pieces[0], Text) and pieces[0].opening:
        prefix = pieces[0].token_ids
        pieces = pieces[1:]
    template_tail = () if request.raw else runs.after_question
    return Prompt(
        prefix=prefix,
        pieces=pieces,
        tail=request.question + template_tail + request.given_answer,
        separator=request.separator,
        own_prefix=prefix == runs.before_documents,
        question_tokens=len(request.question),
        given_tokens=len(request.given_answer),
    )
