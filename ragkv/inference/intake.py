"""Intake: what callers give, as checked values. What a request is refused for is found here, before any work."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ragkv.config import EngineConfig, ReuseMode
from ragkv.errors import InputError, PromptTooLongError
from ragkv.fusion import Selector, make_selector
from ragkv.fusion.controller import R_STAR
from ragkv.fusion.gate_result import GateResult
from ragkv.history import History, Part, PartKind, find, fitted
from ragkv.model import Adapter
from ragkv.model.layout import TemplateRuns, encode
from ragkv.types import Chunk, Text, Unset

from .request import ChunkLike, How, Past, Prompt


class Intake:
    """Checks for one model and its application. Holds no request's state."""

    def __init__(self, adapter: Adapter, tokenizer: Any | None, runs: TemplateRuns, config: EngineConfig) -> None:
        self._tokenizer, self._runs, self._config = tokenizer, runs, config
        self._vocabulary, self._context_length = adapter.vocabulary, adapter.context_length
        self._verdict: GateResult | None = None
        find(config.session.discard)  # refuses an unknown name now
        self._check_ids(runs.before_documents)

    def chunk(self, content: str | Sequence[int], metadata: Mapping[str, Any] | None = None) -> Chunk:
        """A chunk of text or ids; raises `InputError` for one without tokens or with ids the model does not know."""
        if isinstance(content, str):
            content += self._config.prompt.chunk_end if content else ""
        chunk = Chunk(self.encode(content), content if isinstance(content, str) else "", dict(metadata or {}))
        return self._checked(chunk)

    def chunks(self, chunks: Sequence[ChunkLike]) -> list[Chunk]:
        """Chunks of whatever form."""
        if isinstance(chunks, str | Chunk):
            raise InputError("One chunk was given where a sequence of chunks is needed: put it in a list.")
        return [self._checked(chunk) if isinstance(chunk, Chunk) else self.chunk(chunk) for chunk in chunks]

    def encode(self, text_or_ids: str | Sequence[int]) -> tuple[int, ...]:
        """Text as ids, without special tokens; ids as they are."""
        return encode(self._tokenizer, text_or_ids)

    def prompt(
        self,
        question: str | Sequence[int],
        chunks: Sequence[Chunk],
        past: Past,
        room: int,
        answer: str | Sequence[int] = (),
    ) -> Prompt:
        """The prompt's runs; its history is cut until it and an answer of `room` tokens fit (CachedAttention 3.4).

        A given `answer` stands behind the question. Raises `PromptTooLongError` if even no history fits.
        """
        asked, given = self.encode(question), self.encode(answer)
        self._check_ids(asked)
        self._check_ids(given)
        runs = self._runs
        prefix = runs.before_documents
        if chunks and isinstance(chunks[0], Text) and chunks[0].opening:
            prefix, chunks = chunks[0].token_ids, chunks[1:]
        kinds = [Part(PartKind.CHUNK, len(chunk), source=str(chunk.metadata.get("source", ""))) for chunk in chunks]
        kinds += [Part(PartKind.QUESTION, len(asked + runs.after_question)), Part(PartKind.ANSWER, len(given))]
        length = len(prefix) + sum(map(len, kinds))  # without history
        if length + len(past.history) == 0:
            raise InputError("The prompt is empty: no prefix, chunk or question.")
        history, cut = self._fitted(past, length + room, len(prefix))
        prompt = Prompt(
            prefix,
            history,
            tuple(chunk.token_ids for chunk in chunks),
            asked + runs.after_question + given,
            frozenset(index for index, chunk in enumerate(chunks) if isinstance(chunk, Text)),
            prefix == runs.before_documents,
            tuple(part for part in kinds if len(part)),
            (*past.notes, *filter(None, (cut,))),
            len(asked),
        )
        self._check_length(length + len(history), room)
        return prompt

    def how(self, ratio: float | Unset | None, selector: str | Selector | None, reuse: ReuseMode) -> How:
        """The way to make a prompt's KV; what is left out is the config's."""
        fusion = self._config.fusion
        left_out = isinstance(ratio, Unset)
        if isinstance(ratio, Unset):
            ratio = fusion.ratio
        controlled = ratio is None
        if ratio is None:
            ratio = R_STAR
        if not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
            raise InputError(f"ratio is {ratio!r}; it is a share and must lie in [0, 1].")
        if reuse not in get_args(ReuseMode):
            raise InputError(f"reuse is {reuse!r}; it must be one of {', '.join(map(repr, get_args(ReuseMode)))}.")
        keeps_history = self._config.session.inexact_history == "keep"
        chosen = make_selector(fusion.selector if selector is None else selector)
        how = How(float(ratio), chosen, reuse, keeps_history)
        if controlled:
            return self._judged(replace(how, controlled=reuse == "fused"))
        return self._judged(how) if left_out else how

    def apply_gate_result(self, verdict: GateResult | None) -> None:
        """Go by the quality gate's verdict wherever a request leaves the ratio to the config."""
        self._verdict = verdict

    def _judged(self, how: How) -> How:
        verdict = self._verdict
        if verdict is None or how.reuse != "fused" or how.selector.name != verdict.selector:
            return how
        if verdict.ratio is None:
            return replace(how, reuse="none", controlled=False, notes=(f"quality gate {verdict}",))
        if how.controlled:
            return replace(how, ratio=verdict.ratio, most_left=verdict.remaining_deviation)
        if verdict.ratio <= how.ratio:
            return replace(how, most_left=verdict.remaining_deviation)
        note = f"quality gate {verdict}; ratio raised from {how.ratio}"
        return replace(how, ratio=verdict.ratio, most_left=verdict.remaining_deviation, notes=(note,))

    def check_encodable(self, chunks: Sequence[Chunk]) -> None:
        """Raise `PromptTooLongError` for a chunk that does not fit the context behind the prefix."""
        for chunk in chunks:
            self._check_length(len(self._runs.before_documents) + len(chunk), 0)

    def _fitted(self, past: Past, others: int, prefix_tokens: int) -> tuple[History, str | None]:
        """The history as far as it fits beside `others` tokens, and what to say of it."""
        settings = self._config.session
        if self._context_length is None:
            return past.history, None
        discard = settings.discard if past.discard is None else past.discard
        return fitted(past.history, self._context_length - others, settings, discard, prefix_tokens)

    def _check_length(self, length: int, room: int) -> None:
        if self._context_length is not None and length + room > self._context_length:
            raise PromptTooLongError(
                f"The prompt has {length} tokens and the answer may take {room}; the model's context is "
                f"{self._context_length}. Give fewer or shorter chunks, or ask for fewer new tokens."
            )

    def _checked(self, chunk: Chunk) -> Chunk:
        if not chunk.token_ids:
            raise InputError("A chunk has no tokens; leave empty chunks out.")
        self._check_ids(chunk.token_ids)
        return chunk

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocabulary):
            wrong = next(token for token in token_ids if not 0 <= token < self._vocabulary)
            raise InputError(f"Token id {wrong} is not in the model's vocabulary of {self._vocabulary}.")


__all__ = ["Intake"]
