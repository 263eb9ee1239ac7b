"""Intake: validates and tokenizes what callers give. An invalid request is refused here, before any
work.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from ragkv.config import EngineConfig
from ragkv.control import Methods
from ragkv.errors import InputError
from ragkv.model.decode.sampling import GREEDY, SETTINGS, Sampling
from ragkv.model.decode.stopping import TextStream
from ragkv.prompt.constraints import ResponseFormat
from ragkv.prompt.history import History
from ragkv.runtime import Claim
from ragkv.runtime.outside import check_kind, token_ids
from ragkv.types import Chunk, Piece, Text

from .prompt import Prompt, lay_out
from .request import AnswerOptions, PieceLike, PrefillOptions, Request
from .shared_model import SharedModel
from .template import TemplateRuns

if TYPE_CHECKING:
    from .constraints.grammar import Grammar

P = TypeVar("P", bound=Piece)

# The limit of an answer, if the caller gives none.
MAX_NEW_TOKENS = 64
# At most so many of the most probable tokens are reported with each token, as by OpenAI.
MAX_LOGPROBS = 20


class Intake:
    """Checks for one model and one application."""

    def __init__(
        self, model: SharedModel, runs: TemplateRuns, config: EngineConfig, methods: Methods
    ) -> None:
        """`methods` decide how each prompt's KV is to be made."""
        self.runs = runs
        self._model = model
        self._tokenizer = model.tokenizer
        self._config = config
        self._vocabulary = model.adapter.vocabulary
        self.context_length = model.adapter.context_length or sys.maxsize
        self._methods = methods
        self._check_ids(runs.before_documents)
        # Without a tokenizer everything is given as ids, and chunks have no separator.
        self.separator = (
            self.token_ids(config.prompt.separator)
            if config.prompt.separator and self._tokenizer
            else ()
        )

    def chunk(
        self, content: str | Sequence[int], metadata: Mapping[str, Any] | None = None
    ) -> Chunk:
        """A chunk of text or ids. Raises `InputError` if it has no tokens, or ids that the model
        does not know.
        """
        chunk = Chunk(
            self.token_ids(content),
            content if isinstance(content, str) else "",
            dict(metadata or {}),
        )
        return self._checked(chunk)

    def pieces(self, chunks: Sequence[PieceLike]) -> tuple[Piece, ...]:
        """Pieces from pieces, texts and id sequences. Raises what `chunk` raises."""
        check_kind("chunks", chunks, Iterable)
        if isinstance(chunks, str | Piece):
            raise InputError(
                "One chunk was given where a sequence of chunks is needed: put it in a list."
            )
        return tuple(
            self._checked(piece) if isinstance(piece, Piece) else self.chunk(piece)
            for piece in chunks
        )

    def token_ids(self, text_or_ids: str | Sequence[int]) -> tuple[int, ...]:
        """Text as ids, without special tokens; ids as they are."""
        return token_ids(self._tokenizer, text_or_ids)

    def prefill_request(
        self,
        question: str | Sequence[int],
        chunks: Sequence[PieceLike],
        options: PrefillOptions,
        answer: str | Sequence[int] = (),
        *,
        known: type[PrefillOptions] = PrefillOptions,
    ) -> Request:
        """A request that decodes nothing; `answer` is given where a turn is appended.

        Raises `InputError`, also for an option that is not in `known`.
        """
        check_names(options, known)
        title = options.get("title")
        check_kind("title", title, str, type(None))
        claim = self.claim(options)
        request = Request(
            question=self.token_ids(question),
            pieces=self.pieces(chunks),
            method=self._methods.of(options),
            claim=claim,
            asked_after_s=claim.elapsed_s(),
            separator=self._separator(options),
            given_answer=self.token_ids(answer),
            raw=bool(options.get("raw")),
            title=title or "",
        )
        for ids in (request.question, request.separator, request.given_answer):
            self._check_ids(ids)
        return request

    def answer_request(
        self, question: str | Sequence[int], chunks: Sequence[PieceLike], options: AnswerOptions
    ) -> Request:
        """A request whose answer is decoded. Raises `InputError`."""
        request = self.prefill_request(question, chunks, options, known=AnswerOptions)
        max_new_tokens = options.get("max_new_tokens", MAX_NEW_TOKENS)
        stop = options.get("stop", ())
        check_kind("max_new_tokens", max_new_tokens, int)
        check_kind("stop", stop, str, Iterable)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)  # an iterator is read only once
        for text in stops:
            check_kind("stop", text, str)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        logprobs = options.get("logprobs")
        is_count = isinstance(logprobs, int) and not isinstance(logprobs, bool)
        if logprobs is not None and not (is_count and 0 <= logprobs <= MAX_LOGPROBS):
            raise InputError(
                f"logprobs is {logprobs!r}; it must be a whole number in [0, {MAX_LOGPROBS}], or "
                "None."
            )
        TextStream(self._tokenizer, stops)  # raises for stop strings without a tokenizer
        form = options.get("response_format")
        check_kind("response_format", form, ResponseFormat, type(None))
        sampling = Sampling.of(options) if SETTINGS & options.keys() else GREEDY
        self._check_ids(tuple(sampling.logit_bias or ()))
        return replace(
            request,
            max_new_tokens=max_new_tokens,
            stop=stops,
            logprobs=logprobs,
            grammar=None if form is None else self._compiled(form, request),
            sampling=sampling,
        )

    def _compiled(self, form: ResponseFormat, request: Request) -> "Grammar":
        """The grammar of an answer's form. The request's deadline and cancellation end the wait."""
        return self._model.grammars.compile(form, request.claim.tenant, request.claim.check)

    def prompt(
        self, request: Request, history: History | None = None, notes: tuple[str, ...] = ()
    ) -> Prompt:
        """The prompt of a request after its history, of which the report says `notes`. Raises
        `PromptTooLongError`.
        """
        session = self._config.session
        prompt = lay_out(request, history, self.runs, self.context_length, session)
        return replace(prompt, notes=(*notes, *prompt.notes)) if notes else prompt

    def claim(self, options: PrefillOptions) -> Claim:
        """The claim of a request: the options', or one that begins now. Its deadline is the
        options', else the config's. Raises `InputError` for a deadline that is no number.
        """
        if (claim := options.get("claim")) is not None:
            return claim
        deadline_s = options.get("deadline_s")
        check_kind("deadline_s", deadline_s, int, float, type(None))
        if deadline_s is None:
            deadline_s = self._config.scheduler.deadline_s
        return Claim(self._config.store.tenant, deadline_s, options.get("cancel"))

    def _separator(self, options: PrefillOptions) -> tuple[int, ...]:
        given = options.get("separator")
        return self.separator if given is None else self.token_ids(given) if given else ()

    def _checked(self, piece: P) -> P:
        if isinstance(piece, Text) and not piece.token_ids and piece.text:
            piece = replace(piece, token_ids=self.token_ids(piece.text))
        if not piece.token_ids:
            raise InputError("A chunk has no tokens; leave empty chunks out.")
        self._check_ids(piece.token_ids)
        return piece

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocabulary):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocabulary)
            raise InputError(
                f"Token id {wrong} is not in the model's vocabulary of {self._vocabulary}."
            )


def check_names(options: Mapping[str, Any], known: type[PrefillOptions]) -> None:
    """Raise `InputError` for a name that is not in `known`: Python does not check a TypedDict's."""
    for name in options.keys() - known.__annotations__.keys():
        near = get_close_matches(name, known.__annotations__, n=1)
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"Known options: {', '.join(sorted(known.__annotations__))}."
        )
        raise InputError(f"Unknown option {name!r}. {hint}")
