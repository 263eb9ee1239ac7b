"""One completion request in a worker thread: each text is prefilled once and continued, one text after another."""

import time
import uuid
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field

from ragkv.model.decode.token_text import TokenText
from ragkv.types import Answer, TokenEvent

from .answers import check_text, checked_max_tokens, stream_choices
from .bodies.resources import PrefillReport
from .bodies.values import Piece, Usage, notes_of
from .errors import ApiError, check_at_most, unknown_model
from .keys import Principal
from .openai_completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReport,
    CompletionRequest,
    CompletionResponse,
)
from .reports import prefill_fields
from .service import Service
from .tenants import Tenant
from .work.work_context import WorkContext

DEFAULT_MAX_TOKENS = 16  # as OpenAI's


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """One completion request and the way to answer it."""

    service: Service
    principal: Principal
    body: CompletionRequest
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self) -> None:
        """Raise `ApiError` for everything that can be refused before any work."""
        body, limits = self.body, self.service.config.limits
        if body.model != self.service.model_id:
            raise unknown_model(body.model, repr(self.service.model_id))
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options require stream; set stream, or leave them out.", param="stream_options")
        for text in body.prompts:
            check_text(text, limits, "prompt")
        check_at_most(len(body.stop_strings), limits.stop_strings, "stop", "strings")
        check_at_most(self.count, limits.answers, "n", "continuations", setting="limits.answers")
        checked_max_tokens(body.max_tokens, limits)

    @property
    def count(self) -> int:
        """How many continuations the response has."""
        return (self.body.n or 1) * len(self.body.prompts)

    def events(self, context: WorkContext) -> Generator[Piece | CompletionResponse, None, None]:
        """Pieces of the continuations as soon as they are certain, then the whole response."""
        with self.service.tenants.lease(self.principal) as tenant:
            notes = [*notes_of([self.body]), *tenant.known_passages.refresh()]
            answers: list[Answer] = []
            for number, text in enumerate(self.body.prompts):
                yield from self._continuations(context, tenant, text, number * (self.body.n or 1), answers)
            yield self._response(tenant, answers, notes)

    def _continuations(
        self, context: WorkContext, tenant: Tenant, text: str, first: int, answers: list[Answer]
    ) -> Generator[Piece, None, None]:
        """Continue one text; its answers are added to `answers` and numbered from `first`."""
        limits, tokens = self.service.config.limits, TokenText(tenant.engine.tokenizer)
        chunks, question = tenant.dialogue.build_text_prompt(text)
        options = self.body.engine_options
        options["max_new_tokens"] = self.body.max_tokens or min(DEFAULT_MAX_TOKENS, limits.max_tokens)
        events = stream_choices(context, tenant.engine, limits, question, chunks, None, self.body.n or 1, **options)
        with closing(events):
            for index, event in events:
                if isinstance(event, TokenEvent):
                    logprobs = tokens.entries([event.logprob] if event.logprob else [])
                    if event.text or logprobs:
                        yield Piece(first + index, event.text, logprobs)
                elif isinstance(event, Answer):
                    answers.append(event)

    def _response(self, tenant: Tenant, answers: list[Answer], notes: list[str]) -> CompletionResponse:
        tokens, prompts = TokenText(tenant.engine.tokenizer), answers[:: self.body.n or 1]
        choices = [
            CompletionChoice(
                index=index,
                text=answer.text,
                logprobs=None if self.body.logprobs is None else CompletionLogprobs.of(tokens.entries(answer.logprobs)),
                finish_reason=answer.finish_reason,  # type: ignore[arg-type]
            )
            for index, answer in enumerate(answers)
        ]
        reports = [PrefillReport(**prefill_fields(answer, ())) for answer in prompts]
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=choices,
            usage=Usage.of([answer.reuse for answer in prompts], sum(len(answer.token_ids) for answer in answers)),
            ragkv=CompletionReport(prompts=reports, notes=notes),
        )
