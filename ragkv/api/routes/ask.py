"""/v1/ask: a question over a collection."""

import uuid
from collections.abc import Generator
from contextlib import closing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from ragkv.prompt import PromptReport
from ragkv.runtime import Claim
from ragkv.types import TokenEvent

from .. import answers
from ..bodies.resources import AskRequest, AskResponse, PrefillReport
from ..call import ApiCallDep
from ..limits import check_at_most
from ..sources import sources_of
from ..sse import Stream, format_event

router = APIRouter(prefix="/v1", tags=["ask"])

NamedEvent = tuple[str, dict[str, Any]]  # the name of a server-sent event, and its data

_EVENTS = (
    "With `stream`: the events `sources` {sources}, `prompt` {prompt, reuse, timing}, many "
    "`token` {text}, then "
    "`answer` (the whole response) or `error` {error}."
)


@router.post(
    "/ask",
    summary="Ask a question over a collection",
    response_model=AskResponse,
    responses={200: {"description": _EVENTS, "content": {"text/event-stream": {}}}},
)
async def ask(body: AskRequest, call: ApiCallDep) -> AskResponse | Response:
    """Retrieve passages, fuse their stored KV, and answer with sources, citations and a report."""
    limits = call.limits
    answers.check_text(body.question, limits, "question")
    check_at_most(body.k, limits.documents, "k", "documents")
    max_tokens, notes = answers.max_tokens_of(body.max_tokens, limits)
    form = body.response_format.form if body.response_format else None

    def events(claim: Claim) -> Generator[NamedEvent | AskResponse, None, None]:
        with answers.answer_job(call, claim, body, body.question) as job:
            tenant = job.tenant
            with tenant.preparing(claim.check):
                job.retrieve(body.question, body)
                question = tenant.engine.token_ids(body.question)
            sources = sources_of(job.found.hits)
            numbers = [source.number for source in sources]
            yield "sources", {"sources": [source.model_dump() for source in sources]}
            options = body.engine_options
            options["max_new_tokens"], options["response_format"] = max_tokens, form
            if not job.found.hits:
                notes.append(answers.nothing_found(body.collection))
            with closing(job.stream(question, job.found.chunks, job.session, **options)) as steps:
                for step in steps:
                    if isinstance(step, PromptReport):
                        report = PrefillReport(**answers.prefill_fields(step, numbers))
                        yield "prompt", report.model_dump()
                    elif isinstance(step, TokenEvent):
                        if step.text:
                            yield "token", {"text": step.text}
                    else:
                        yield AskResponse(
                            id=f"ask-{uuid.uuid4().hex}",
                            answer=step.text,
                            finish_reason=step.finish_reason,  # type: ignore[arg-type]
                            **answers.answer_fields(
                                step,
                                step.text,
                                sources,
                                step.citations,
                                numbers,
                                body.session_id,
                            ),
                            notes=notes,
                        )

    if body.stream:
        items = await call.stream(events)
        return Stream(items, _shown, lambda error: format_event(error.body, "error"))
    return await call.answer(events, AskResponse)


def _shown(item: NamedEvent | AskResponse) -> list[str]:
    name, data = ("answer", item.model_dump()) if isinstance(item, AskResponse) else item
    return [format_event(data, name)]
