"""Answers in worker threads, for every endpoint. Each answer has limits, events, accounting, and a
report as a response body.

A cancelled answer is accounted for up to its last token.
"""

import dataclasses
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

from ragkv.prompt import AnswerOptions, PromptReport
from ragkv.retrieval import Hit
from ragkv.runtime import Claim
from ragkv.sessions import Session
from ragkv.types import Answer, Chunk, Citation, Piece, TokenEvent

from .bodies.chat import ChatRequest
from .bodies.resources import (
    AskRequest,
    RetrievalBody,
    ReuseBody,
    SourceBody,
    SpanBody,
)
from .call import ApiCall
from .limits import check_at_most
from .settings import LimitsConfig
from .sources import citations_of
from .tenants import Tenant

DEFAULT_MAX_TOKENS = 256
# Seconds that the end of an answer waits until the turn of its conversation is on disk.
SAVE_S = 5.0
TITLE_CHARS = 80

AnswerSteps = Generator[PromptReport | TokenEvent | Answer, None, None]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The passages for a question."""

    collection: str
    hits: Sequence[Hit] = ()
    chunks: Sequence[Chunk] = ()  # of the hits
    deletion_count: int = 0  # of the tenant's texts, before these were read


def max_tokens_of(requested: int | None, limits: LimitsConfig) -> tuple[int, list[str]]:
    """The most tokens an answer may have, and a note if these are fewer than the request
    asks for.
    """
    most = min(requested or DEFAULT_MAX_TOKENS, limits.max_tokens)
    cut = requested is not None and most < requested
    return most, [
        f"max_tokens is {most}, not {requested}: limits.max_tokens of this server"
    ] if cut else []


def check_text(text: str, limits: LimitsConfig, param: str) -> None:
    """Raise `ApiError` for a question, query or message that is too long."""
    check_at_most(len(text), limits.question_chars, param, "characters", "context_length_exceeded")


@dataclasses.dataclass(slots=True)
class AnswerJob:
    """A request for an answer while it is worked on, in a worker thread."""

    call: ApiCall
    claim: Claim
    tenant: Tenant
    session: Session | None  # that the request names
    title: str  # of the session, if it has none yet
    found: Found = Found("")

    def retrieve(
        self, question: str, wanted: RetrievalBody, param: str = "collection", before: str = ""
    ) -> None:
        """Find the passages for a question. `param` is the request field that names the collection,
        `before` the question before, where no session has it.
        """
        engine = self.tenant.engine
        collections = self.tenant.collections
        deletion_count = collections.deletion_count
        check = self.claim.check
        with (
            engine.parts.scheduler.request(),
            collections.use(wanted.collection, param, check) as rag,
        ):
            hits = rag.retrieve(
                question,
                wanted.k,
                retriever=wanted.retriever,
                where=wanted.filter,
                order=wanted.order,
                before=self.session or before,
                check=check,
            )
            chunks = rag.chunks_of(hits)
        self.found = Found(wanted.collection, hits, chunks, deletion_count)

    def delete_kv_of_deleted(self) -> None:
        """Delete the KV of found passages that were deleted since."""
        found = self.found
        texts = [hit.passage.text for hit in found.hits]
        self.tenant.collections.delete_kv_of_deleted(found.collection, texts, found.deletion_count)

    def stream(
        self,
        question: str | Sequence[int],
        chunks: Sequence[Piece],
        session: Session | None,
        **options: Unpack[AnswerOptions],
    ) -> AnswerSteps:
        """The report of the prompt once it is computed, token events, then the answer. The deadline
        and cancellation are the claim's.

        The answer comes when its turn is on disk, and the session is free by then.
        """
        report: PromptReport | None = None
        answer: Answer | None = None
        tokens = 0
        options["claim"] = self.claim
        options["title"] = self.title
        engine = self.tenant.engine
        events = engine.events(engine.request(question, chunks, **options), session)
        try:
            for event in events:
                if isinstance(event, Answer):
                    answer = event
                    continue
                if isinstance(event, PromptReport):
                    report = event
                else:
                    tokens += 1
                yield event
        finally:
            events.close()
            if report is not None:
                tokens = tokens if answer is None else len(answer.token_ids)
                timing = report.timing if answer is None else answer.timing
                self.call.record_answer(timing, report.reuse, tokens)
        assert answer is not None  # every stream ends with one
        unsaved = None if session is None else session.wait_saved(SAVE_S)
        yield answer.with_notes(unsaved) if unsaved else answer


@contextmanager
def answer_job(
    call: ApiCall, claim: Claim, body: AskRequest | ChatRequest, question: str
) -> Iterator[AnswerJob]:
    """The sender's tenant, and the session that `body` names, new or stored; raises `ApiError` if a
    new one exceeds the quota.

    However the block ends, KV of passages that were deleted meanwhile is deleted.

    `question` is the title of a conversation that has none yet.
    """
    with call.tenants.use(call.principal, claim.check) as tenant:
        session = None
        if body.session_id is not None:
            tenant.check_session_quota(call.principal, body.session_id)
            session = tenant.session(body.session_id)
        job = AnswerJob(call, claim, tenant, session, title_from(question))
        try:
            yield job
        finally:
            job.delete_kv_of_deleted()


def nothing_found(collection: str) -> str:
    """The note of an answer over a collection of which no passage matches."""
    return f"answered without documents: no passage of the collection {collection} matches"


def title_from(question: str) -> str:
    """The beginning of a question as one line of visible characters that do not change the
    direction of others.
    """
    visible = "".join(
        " " if unicodedata.category(char)[0] in "CZ" else char
        for char in question[: 8 * TITLE_CHARS]
    )
    line = " ".join(visible.split())
    return line if len(line) <= TITLE_CHARS else f"{line[: TITLE_CHARS - 1].rstrip()}…"


def prefill_fields(report: PromptReport | Answer, numbers: Sequence[int | None]) -> dict[str, Any]:
    """The fields of a `PrefillReport`. `numbers` are the source numbers of the request's
    chunks.
    """
    spans = []
    for span in report.spans:
        number = None
        if span.chunk is not None and span.chunk < len(numbers):
            number = numbers[span.chunk]
        spans.append(
            SpanBody(**dataclasses.asdict(span), recomputed=span.recomputed, number=number)
        )
    reuse = ReuseBody(**dataclasses.asdict(report.reuse), tokens=report.reuse.tokens)
    return {"reuse": reuse, "timing": report.timing, "prompt": spans}


def answer_fields(
    answer: Answer,
    content: str,
    sources: list[SourceBody],
    cited: Iterable[Citation],
    numbers: Sequence[int | None],
    session_id: str | None,
) -> dict[str, Any]:
    """The fields of an `AnswerReport`. `content` is the answer's text as the client sees it,
    `cited` what it cites of the `sources`.
    """
    citations = citations_of(content, sources, cited)
    report = {"citations": citations, "sources": sources, "session_id": session_id}
    return {**prefill_fields(answer, numbers), **report}
