"""The answer to a prompt, token by token: from the model of this process, or as another server
sends it.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ragkv.model.decode.sampling import GREEDY, Sampler, token_logprob
from ragkv.model.decode.stopping import TextStream, end_tokens
from ragkv.scheduling import Scheduler
from ragkv.types import Answer, TokenEvent, TokenLogprob

from .backend import AnswerEvents, StartedAnswer
from .citations import cite
from .drafts import Drafts
from .hints import hint_of
from .lookup import Lookup
from .prefill import Prefiller
from .prompt import Task
from .request import PrefilledPrompt, PromptReport, Request
from .shared_model import SharedModel

if TYPE_CHECKING:
    from .constraints.grammar import TokenConstraint


class ActiveAnswer:
    """An answer while its tokens come, from this model or another server: its text, why it ended,
    and its report.
    """

    def __init__(self, task: Task, report: PromptReport, tokenizer: Any | None) -> None:
        request = task.request
        self._request = request
        self._most_tokens = task.prompt.answer_tokens
        self._elapsed_s = task.claim.elapsed_s
        self._report = report
        self._text = TextStream(tokenizer, request.stop, as_written=request.raw)
        self._logprobs: list[TokenLogprob] = []
        self._first_token_s = 0.0
        self.drafts: Drafts | None = None  # another server's answer has none
        self.tokens: list[int] = []
        self.reason: str | None = None  # why it ended: "stop" or "length"; None: it goes on

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self.reason is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report of this answer."""
        return self._request.sampling.notes

    def end(self) -> None:
        """End the answer: its next token is an end token, which is not part of it."""
        self._note_first_token()
        self.reason = "stop"

    def add(self, token: int, logprob: TokenLogprob | None = None) -> TokenEvent:
        """Add the next token; returns its event."""
        self._note_first_token()
        self.tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        event = TokenEvent(self._text.add(token), token, logprob)
        if self._text.stopped:
            self.reason = "stop"
        elif len(self.tokens) == self._most_tokens:
            self.reason = "length"
        return event

    def finish(self) -> Iterator[TokenEvent | Answer]:
        """Yield the text that was held back, then the whole answer."""
        if rest := self._text.flush():
            yield TokenEvent(rest, None)
        self._note_first_token()  # an answer may have no token
        report = self._report
        assert self.reason is not None
        decode_s = self._elapsed_s() - self._first_token_s
        timing = replace(report.timing, first_token_s=self._first_token_s, decode_s=decode_s)
        if drafts := self.drafts:
            timing = replace(timing, drafted=drafts.proposed, accepted=drafts.accepted)
        yield Answer(
            text=self._text.text,
            token_ids=tuple(self.tokens),
            finish_reason=self.reason,
            timing=timing,
            reuse=report.reuse,
            citations=cite(self._text.text, self._request.pieces),
            spans=report.spans,
            logprobs=tuple(self._logprobs),
        ).with_notes(*self.notes)

    def _note_first_token(self) -> None:
        self._first_token_s = self._first_token_s or self._elapsed_s()


@dataclass(eq=False)
class LocalBackend:
    """The model in this process computes."""

    model: SharedModel
    scheduler: Scheduler
    lookup: Lookup
    prefiller: Prefiller
    most_drafts: int  # tokens found in the prompt that a step verifies at most

    def refuse_unsupported(self, request: Request) -> None:
        """Accept every request: the intake has checked it."""

    @contextmanager
    def started(self, task: Task) -> Iterator[StartedAnswer]:
        """Fuse and compute the prompt, then decode."""
        tokens = len(task.prompt.token_ids)
        with self.scheduler.admitted(task.claim, tokens, lambda: hint_of(self.lookup, task)):
            prefill = self.prefiller.prefill(task)
        with closing(self._decode(task, prefill)) as events:
            yield StartedAnswer(prefill, events)

    def _decode(self, task: Task, prefill: PrefilledPrompt) -> AnswerEvents:
        """The events of a prefilled request's answer: tokens, then the `Answer`."""
        grammar = task.request.grammar
        constraint = None if grammar is None else grammar.start(task.claim.tenant)
        ends = (
            end_tokens(self.model.adapter.model, self.model.tokenizer)
            if constraint is None
            else constraint.end_tokens
        )
        sampler = None
        if constraint is not None or task.request.sampling != GREEDY:
            seen = prefill.token_ids.to(self.model.adapter.device)
            sampler = Sampler(task.request.sampling, seen, ends, constraint)
        answer = _DecodedAnswer(task, prefill, self.model.tokenizer, sampler, ends, constraint)
        event = answer.choose(prefill.logits, *answer.greedy(prefill.logits.unsqueeze(0)))
        if event is not None:
            yield event
        if not answer.ended:
            yield from self._steps(task, prefill, answer)
        yield from answer.finish()

    def _steps(
        self, task: Task, prefill: PrefilledPrompt, answer: "_DecodedAnswer"
    ) -> Iterator[TokenEvent]:
        """The events of all tokens behind the first one.

        A conversation's turn records the KV of every token but the last, which is never run.
        """
        batch = self.scheduler.batch
        drafts = answer.drafts = Drafts(prefill.token_ids.tolist(), self.most_drafts)
        drafts.add(answer.tokens[-1])
        prepared = () if answer.constraint is None else (answer.constraint.prepare,)
        record = prefill.turn_kv.record if prefill.turn_kv else None
        with batch.slot(prefill.kv, record, task.claim.tenant) as slot:
            while not answer.ended:
                tried = drafts.propose(slot.room)
                rows = slot.verify(answer.tokens[-1], tried, meanwhile=prepared)
                took_s = slot.step_s
                accepted = 0
                choices = zip(rows, answer.greedy(rows), (*tried, None), strict=True)
                for logits, greedy, draft in choices:
                    event = answer.choose(logits, greedy)
                    if is_right := not answer.ended and answer.tokens[-1] == draft:
                        accepted += 1
                    else:
                        # Drop wrong drafts before the token is handed out: the turn saves blocks up
                        # to what is recorded.
                        slot.keep(len(tried), accepted)
                    if event is not None:
                        drafts.add(answer.tokens[-1])
                        yield event
                    if not is_right:
                        break
                drafts.verified(len(tried), accepted, took_s)


class _DecodedAnswer(ActiveAnswer):
    """An answer whose tokens are chosen here."""

    def __init__(
        self,
        task: Task,
        prefill: PrefilledPrompt,
        tokenizer: Any | None,
        sampler: Sampler | None,
        end_tokens: tuple[int, ...],
        constraint: "TokenConstraint | None",
    ) -> None:
        """Without a `sampler` the most probable token is taken."""
        super().__init__(task, prefill, tokenizer)
        self.constraint = constraint
        self._sampler = sampler
        self._ends = end_tokens

    def greedy(self, rows: torch.Tensor) -> Sequence[int | None]:
        """The most probable token after each of the logits (B, V), read from the device at once;
        `None` where a sampler chooses.
        """
        if self._sampler is not None:
            return [None] * len(rows)
        tokens: list[int] = rows.argmax(dim=-1).tolist()
        return tokens

    def choose(self, logits: torch.Tensor, greedy: int | None) -> TokenEvent | None:
        """Choose the token after `logits` (V,), which is `greedy` without a sampler; `None` for an
        end token, which is not part of the answer.
        """
        token = self._sampler.choose(logits) if self._sampler is not None else greedy
        assert token is not None
        if token in self._ends:
            self.end()
            return None
        alternatives = self._request.logprobs
        event = self.add(
            token, None if alternatives is None else token_logprob(logits, token, alternatives)
        )
        if self.constraint is not None and self.constraint.finished:
            self.reason = "stop"
        return event

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes, with one on an answer that was cut before it had its form."""
        if self.constraint is None or self.constraint.complete:
            return super().notes
        what = "a stop string" if self._text.stopped else f"max_new_tokens={self._most_tokens}"
        return (
            *super().notes,
            f"the answer does not have its response format: {what} ended it before",
        )
