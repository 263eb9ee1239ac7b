"""A prompt as runs of token ids: prefix, history, chunks with the text between them, question.

The runs are concatenated as ids; nothing is decoded and tokenized again, so a chunk has the same
ids at any place. History comes before the chunks, so that it is an exact prefix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from ragkv.config import SessionConfig
from ragkv.errors import InputError, PromptTooLongError
from ragkv.prompt.history import EMPTY, History, Part, PartKind, fitted
from ragkv.types import Chunk, Excerpt, Text

from .request import Request
from .template import TemplateRuns

# the room left for history if the answer does not fit even without it
LEAST_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Past:
    """What precedes a turn of a conversation."""

    history: History = EMPTY
    notes: tuple[str, ...] = ()  # what the turn's report says about the history


@dataclass(frozen=True, slots=True)
class Prompt:
    """The runs of one prompt, in order."""

    prefix: tuple[int, ...]
    history: History  # as much of it as fits
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]  # with the template's tail, then a given answer
    plain: frozenset[int] = frozenset()  # indices of chunks that are only text: never stored
    separator: tuple[int, ...] = ()  # computed after each chunk that no text follows
    excerpts: Mapping[int, Excerpt] = field(default_factory=dict)  # parts of stored chunks
    own_prefix: bool = True  # whether `prefix` is the application's, with which entries are made
    parts: tuple[Part, ...] = ()  # the runs after the history, by kind
    notes: tuple[str, ...] = ()  # what the report says about the history and the length
    answer_tokens: int = 0  # the most tokens of the answer that were asked for, or that fit
    question_tokens: int = 0  # the first ids of `question` that are not the template's

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All S ids."""
        body = (ids for ids, _ in self.body)
        return tuple(chain(self.prefix, self.history.token_ids, *body, self.question))

    @property
    def question_end(self) -> int:
        """The position after the question itself, where the template goes on."""
        return len(self.token_ids) - len(self.question) + self.question_tokens

    @property
    def stored_ids(self) -> tuple[tuple[int, ...], ...]:
        """The ids under which the KV of each chunk is stored."""
        parts = self.excerpts
        return tuple(
            parts[index].whole if index in parts else ids for index, ids in enumerate(self.chunks)
        )

    @property
    def body(self) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """The runs between history and question, each with its chunk's index; `None` is text.

        The separator comes after a chunk and never before the first one.
        """
        for index, ids in enumerate(self.chunks):
            is_text = index in self.plain
            yield ids, None if is_text else index
            if self.separator and not is_text and index + 1 not in self.plain:
                yield self.separator, None


def lay_out(
    request: Request,
    past: Past,
    runs: TemplateRuns,
    context_length: int,
    settings: SessionConfig,
) -> Prompt:
    """The prompt of a request after its past (CachedAttention section 3.4).

    History is cut until it and the answer fit the context; an answer that does not fit even without
    history is cut to what fits. Raises `PromptTooLongError` if no token of an answer fits.
    """
    alone = _without_history(request, runs)
    asked = request.max_new_tokens
    length = len(alone.token_ids)
    if length + len(past.history) == 0:
        raise InputError("The prompt is empty: no prefix, chunk or question.")
    fits = length + asked <= context_length
    others = length + (asked if fits else min(asked, LEAST_ANSWER_TOKENS))
    history = past.history
    truncated = None
    if history:
        history, truncated = fitted(history, context_length - others, settings)
    check_length(length + len(history), min(asked, 1), context_length)
    room = asked if fits else context_length - length - len(history)
    cut = (
        None
        if fits
        else f"the answer may have {room} tokens, not {asked}: the context is {context_length}"
    )
    return replace(
        alone,
        history=history,
        parts=_parts(alone, request),
        notes=(*past.notes, *filter(None, (truncated, cut))),
        answer_tokens=room,
    )


def check_length(length: int, headroom: int, context_length: int) -> None:
    """Raise `PromptTooLongError` if the tokens and an answer do not fit the context."""
    if length + headroom > context_length:
        raise PromptTooLongError(
            f"The prompt has {length} tokens and needs room for {headroom} of an answer; the "
            f"model's context is {context_length}. Give fewer or shorter chunks."
        )


def _without_history(request: Request, runs: TemplateRuns) -> Prompt:
    chunks = request.chunks
    prefix = () if request.raw else runs.before_documents
    if chunks and isinstance(chunks[0], Text) and chunks[0].opening:
        prefix = chunks[0].token_ids
        chunks = chunks[1:]
    tail = () if request.raw else runs.after_question
    return Prompt(
        prefix=prefix,
        history=EMPTY,
        chunks=tuple(chunk.token_ids for chunk in chunks),
        question=request.question + tail + request.given_answer,
        plain=frozenset(i for i, chunk in enumerate(chunks) if isinstance(chunk, Text)),
        separator=request.separator,
        excerpts={i: chunk for i, chunk in enumerate(chunks) if isinstance(chunk, Excerpt)},
        own_prefix=prefix == runs.before_documents,
        question_tokens=len(request.question),
    )


def _parts(prompt: Prompt, request: Request) -> tuple[Part, ...]:
    """The runs that a conversation keeps, marked as documents, question and answer."""
    given: tuple[Chunk, ...] = request.chunks[len(request.chunks) - len(prompt.chunks) :]
    sources = [str(chunk.metadata.get("source", "")) for chunk in given]
    answer = len(request.given_answer)
    parts = [
        *(
            Part(PartKind.CHUNK, len(ids), source="" if at is None else sources[at])
            for ids, at in prompt.body
        ),
        Part(PartKind.QUESTION, len(prompt.question) - answer),
        Part(PartKind.ANSWER, answer),
    ]
    return tuple(part for part in parts if len(part))
