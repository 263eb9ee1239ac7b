"""From a laid out prompt to an answer, token by token, and who computes it: the model here, or
another server.
"""

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from ragkv.model import Adapter
from ragkv.model.decode.sampling import Sampler
from ragkv.model.decode.stopping import TextStream, end_tokens
from ragkv.scheduling import DecodeBatch
from ragkv.store import PrefetchHint
from ragkv.types import Answer, TokenEvent, TokenLogprob

from .citations import cite
from .drafts import Drafts
from .planner import Planner
from .prefill import Prefiller
from .request import ActiveRequest, Prefill, Request

# the tokens of an answer, then the answer
AnswerEvents = Generator[TokenEvent | Answer, None, None]


class AnswerBackend(Protocol):
    """Serves prompts that are laid out. Holds no request's state; any number of threads may call
    it.
    """

    makes_kv: bool  # whether a prompt's KV and logits are made here: `begin` sets a `Prefill`

    def check(self, request: Request) -> None:
        """Raise `UnsupportedError` for what it cannot do, before any work."""
        ...

    def prefetch_hint(self, active: ActiveRequest) -> PrefetchHint:
        """What it will read of this engine's store."""
        ...

    def begin(self, active: ActiveRequest) -> AnswerEvents:
        """Serve the prompt and set `active.prefill`; the answer's events follow.

        What is held until the request ends goes to `active.held`.
        """
        ...


class ActiveAnswer:
    """An answer while its tokens come, from this model or another server: its text, why it ended,
    and its report.
    """

    def __init__(self, active: ActiveRequest, tokenizer: Any | None) -> None:
        request = active.request
        self._active = active
        self._text = TextStream(tokenizer, request.stop, as_written=request.raw)
        self._logprobs: list[TokenLogprob] = []
        self._first_token_s = 0.0
        self.drafts = Drafts((), 0)  # of another server's answer none are known
        self.tokens: list[int] = []
        self.reason: str | None = None  # why it ended: "stop" or "length"; None: it goes on

    @property
    def ended(self) -> bool:
        """Whether it is complete."""
        return self.reason is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """What its report says about this answer."""
        return self._active.request.sampling.notes

    def end(self) -> None:
        """Its next token is an end token, which is not part of it."""
        self._note_token()
        self.reason = "stop"

    def add(self, token: int, logprob: TokenLogprob | None = None) -> TokenEvent:
        """Its next token."""
        self._note_token()
        self.tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        event = TokenEvent(self._text.add(token), token, logprob)
        if self._text.stopped:
            self.reason = "stop"
        elif len(self.tokens) == self._active.request.max_new_tokens:
            self.reason = "length"
        return event

    def finish(self) -> Iterator[TokenEvent | Answer]:
        """The text that was held back, and the whole answer."""
        if rest := self._text.finish():
            yield TokenEvent(rest, self.tokens[-1])
        self._note_token()  # unless one had come
        served = self._active.prefill
        assert self.reason is not None
        decode_s = self._active.elapsed_s() - self._first_token_s
        counts = {"drafted": self.drafts.proposed, "accepted": self.drafts.accepted}
        yield Answer(
            text=self._text.text,
            token_ids=tuple(self.tokens),
            finish_reason=self.reason,
            timing=replace(
                served.timing, first_token_s=self._first_token_s, decode_s=decode_s, **counts
            ),
            reuse=served.reuse,
            citations=cite(self._text.text, self._active.request.chunks),
            spans=served.spans,
            logprobs=tuple(self._logprobs),
        ).with_notes(*self.notes)

    def _note_token(self) -> None:
        self._first_token_s = self._first_token_s or self._active.elapsed_s()


class AnswerGenerator:
    """Decodes answers for one model. Holds no request's state."""

    def __init__(
        self, adapter: Adapter, tokenizer: Any | None, batch: DecodeBatch, most_drafts: int
    ) -> None:
        """A step verifies at most `most_drafts` tokens that are found in the prompt."""
        self.device = adapter.device
        self.tokenizer = tokenizer
        self._batch = batch
        self._most_drafts = most_drafts
        self.end_tokens = end_tokens(adapter.model, tokenizer)

    def stream(self, active: ActiveRequest) -> AnswerEvents:
        """The events of a prefilled request's answer: tokens, then the `Answer`.

        A conversation's turn records the KV of every token but the last, which is never run.
        """
        prefill = active.prefill
        assert isinstance(prefill, Prefill)
        drafts = Drafts(prefill.token_ids.tolist(), self._most_drafts)
        answer = _SampledAnswer(active, prefill.token_ids, self, drafts)
        rows = prefill.logits.unsqueeze(0)
        prepared = () if answer.constraint is None else (answer.constraint.prepare,)
        tried: tuple[int, ...] = ()
        took_s = 0.0
        with self._batch.slot(
            prefill.fused.kv, prefill.turn_kv.record if prefill.turn_kv else None
        ) as slot:
            while True:
                accepted = 0
                for logits, draft in zip(rows, (*tried, None), strict=True):
                    event = answer.choose(logits)
                    if is_right := not answer.ended and answer.tokens[-1] == draft:
                        accepted += 1
                    else:
                        # before anybody sees the token: its KV is not there yet
                        slot.keep(len(tried), accepted)
                    if event is not None:
                        yield event
                    if not is_right:
                        break
                drafts.verified(len(tried), accepted, took_s)
                if answer.ended:
                    break
                tried = drafts.propose(slot.room)
                rows = slot.verify(answer.tokens[-1], tried, meanwhile=prepared)
                took_s = self._batch.step_s
        yield from answer.finish()


class ModelBackend:
    """The engine's own model computes."""

    makes_kv = True

    def __init__(self, planner: Planner, prefiller: Prefiller, generator: AnswerGenerator) -> None:
        self._planner = planner
        self._prefiller = prefiller
        self._generator = generator

    def check(self, request: Request) -> None:
        """Whatever the intake lets through is served."""

    def prefetch_hint(self, active: ActiveRequest) -> PrefetchHint:
        """The history's blocks and the chunks."""
        return self._planner.prefetch_hint(active)

    def begin(self, active: ActiveRequest) -> AnswerEvents:
        """Fuse and compute the prompt; then decode."""
        self._prefiller.prefill(active)
        return self._generator.stream(active)


class _SampledAnswer(ActiveAnswer):
    """An answer whose tokens are chosen here."""

    def __init__(
        self,
        active: ActiveRequest,
        prompt_ids: torch.Tensor,
        generator: AnswerGenerator,
        drafts: Drafts,
    ) -> None:
        super().__init__(active, generator.tokenizer)
        self.drafts = drafts
        grammar = active.request.grammar
        self.constraint = None if grammar is None else grammar.start()
        self._ends = generator.end_tokens if self.constraint is None else self.constraint.end_tokens
        self._sampler = Sampler(
            active.request.sampling, prompt_ids.to(generator.device), self._ends, self.constraint
        )

    def choose(self, logits: torch.Tensor) -> TokenEvent | None:
        """Choose the token after `logits` (V,); `None` for an end token, which is not part of the
        answer.
        """
        token = self._sampler.choose(logits)
        if token in self._ends:
            self.end()
            return None
        self.drafts.add(token)
        alternatives = self._active.request.logprobs
        event = self.add(
            token, None if alternatives is None else token_logprob(logits, token, alternatives)
        )
        if self.constraint is not None and self.constraint.finished:
            self.reason = "stop"
        return event

    @property
    def notes(self) -> tuple[str, ...]:
        """Also a note on an answer that was cut before it had its form."""
        if self.constraint is None or self.constraint.complete:
            return super().notes
        what = (
            "a stop string"
            if self._text.stopped
            else f"max_new_tokens={self._active.request.max_new_tokens}"
        )
        return (
            *super().notes,
            f"the answer does not have its response format: {what} ended it before",
        )


def token_logprob(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """The log probability of `token` after `logits` (V,), and those of the most probable tokens."""
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(alternatives, logprobs.numel()))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(top))
