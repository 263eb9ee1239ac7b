"""From a prefill to answers, token by token. The answers to one prompt decode together."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ragkv.constraints import TokenConstraint
from ragkv.model import Adapter
from ragkv.model.decoding import end_tokens
from ragkv.model.sampling import Sampler
from ragkv.model.stopping import TextStream
from ragkv.scheduling import DecodeBatch
from ragkv.types import Answer, TokenEvent, TokenLogprob

from .citations import cite
from .request import ActiveRequest


class AnswerGenerator:
    """Decodes answers for one model. Holds no request's state."""

    def __init__(self, adapter: Adapter, tokenizer: Any | None, batch: DecodeBatch) -> None:
        self._adapter, self._tokenizer, self._batch = adapter, tokenizer, batch
        self._end_tokens = end_tokens(adapter.model, tokenizer)

    def stream(self, active: ActiveRequest, choices: int = 1) -> Iterator[tuple[int, TokenEvent | Answer]]:
        """The events of a prefilled request's answers, each with the index of its answer: tokens, then the `Answer`.

        A conversation's turn records the KV of every token but the last, which is never run; it has one answer.
        """
        prefill = active.prefill
        record = prefill.turn_kv.record if prefill.turn_kv else None
        assert record is None or choices == 1
        kvs = [prefill.fused.kv, *(prefill.fused.kv.copy() for _ in range(choices - 1))]
        answers = [_ActiveAnswer(active, index, self) for index in range(choices)]
        with ExitStack() as slots:
            taken = [slots.enter_context(self._batch.slot(kv, record)) for kv in kvs]
            logits = dict.fromkeys(range(choices), prefill.logits)  # of the answers that go on
            while logits:
                for index, last in list(logits.items()):
                    if (event := answers[index].add(last)) is not None:
                        yield index, event
                    if answers[index].reason is not None:
                        del logits[index]
                        taken[index].close()
                        for final in answers[index].finish():
                            yield index, final
                steps = [(taken[index], answers[index].tokens[-1]) for index in logits]
                prepared = [answer.constraint.prepare for answer in answers if answer.constraint is not None]
                logits = dict(zip(logits, self._batch.step_together(steps, meanwhile=prepared), strict=True))

    def text_stream(self, active: ActiveRequest) -> TextStream:
        """The text of one answer to this request."""
        return TextStream(self._tokenizer, active.request.stop, as_written=active.request.raw)

    def sampler(self, active: ActiveRequest, index: int, constraint: TokenConstraint | None) -> Sampler:
        """The sampler of the answer `index`: each has a seed of its own."""
        sampling = active.request.sampling
        if sampling.seed is not None and index:
            sampling = replace(sampling, seed=(sampling.seed + index + 2**63) % 2**64 - 2**63)
        ends = self._end_tokens if constraint is None else constraint.end_tokens
        return Sampler(sampling, active.prefill.token_ids.to(self._adapter.device), ends, constraint)

    def is_end(self, token: int, constraint: TokenConstraint | None) -> bool:
        """Whether the token ends an answer."""
        return token in (self._end_tokens if constraint is None else constraint.end_tokens)


class _ActiveAnswer:
    """One answer while it is decoded."""

    def __init__(self, active: ActiveRequest, index: int, generator: AnswerGenerator) -> None:
        self._active, self._generator = active, generator
        grammar = active.request.grammar
        self.constraint = None if grammar is None else grammar.start()
        self._text, self._sampler = generator.text_stream(active), generator.sampler(active, index, self.constraint)
        self._logprobs: list[TokenLogprob] = []
        self._first_token_s = 0.0
        self.tokens: list[int] = []
        self.reason: str | None = None  # why it ended; None: it goes on

    def add(self, logits: torch.Tensor) -> TokenEvent | None:
        """Choose the token after `logits` (V,); `None` for an end token, which is not part of the answer."""
        token = self._sampler.choose(logits)
        self._first_token_s = self._first_token_s or self._active.elapsed_s()
        if self._generator.is_end(token, self.constraint):
            self.reason = "stop"
            return None
        self.tokens.append(token)
        alternatives = self._active.request.logprobs
        logprob = None if alternatives is None else token_logprob(logits, token, alternatives)
        if logprob is not None:
            self._logprobs.append(logprob)
        event = TokenEvent(self._text.add(token), token, logprob)
        if self._text.stopped or (self.constraint is not None and self.constraint.finished):
            self.reason = "stop"
        elif len(self.tokens) == self._active.request.max_new_tokens:
            self.reason = "length"
        return event

    def finish(self) -> Iterator[TokenEvent | Answer]:
        """The text that was held back, and the whole answer."""
        if rest := self._text.finish():
            yield TokenEvent(rest, self.tokens[-1])
        request, prefill = self._active.request, self._active.prefill
        assert self.reason is not None
        decode_s = self._active.elapsed_s() - self._first_token_s
        yield Answer(
            text=self._text.text,
            token_ids=tuple(self.tokens),
            finish_reason=self.reason,
            timing=replace(prefill.timing, first_token_s=self._first_token_s, decode_s=decode_s),
            reuse=prefill.reuse,
            citations=cite(self._text.text, request.chunks),
            spans=prefill.spans,
            logprobs=tuple(self._logprobs),
        ).with_notes(*request.sampling.notes, *self._form_notes())

    def _form_notes(self) -> tuple[str, ...]:
        """A note on an answer that was cut before it had its form."""
        if self.constraint is None or self.constraint.complete:
            return ()
        what = "a stop string" if self._text.stopped else f"max_new_tokens={self._active.request.max_new_tokens}"
        return (f"the answer does not have its response format: {what} ended it before",)


def token_logprob(logits: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    """The log probability of `token` after `logits` (V,), and those of the most probable tokens."""
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(alternatives, logprobs.numel()))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(top))


__all__ = ["AnswerGenerator"]
