"""A chat request on a worker's thread: messages and documents to what the engine is asked, events to what is said.

Documents stand before what the last user turn says. With a session its history stands for all earlier messages.
Without, messages that go on from an earlier answer word for word find its KV by their content; where documents come
beside the messages there is nothing to find, since the next request's messages will not hold them.
"""

import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from starlette.requests import Request as HTTPRequest

from ragkv.dialogue import DialogueDocument, DialoguePrompt, DialogueRequest, Turn, insert_documents
from ragkv.errors import InputError
from ragkv.inference import Prefill
from ragkv.types import UNSET, Answer, Chunk, Text, TokenEvent

from .answering import answering, check_count, check_text, max_tokens_of, session_of
from .citing import Markers, behind, places, without_markers
from .errors import ApiError, not_found
from .keys import Principal
from .openai_chat import (
    Annotation,
    ChatRequest,
    ChatResponse,
    Choice,
    Message,
    PromptTokensDetails,
    Report,
    Said,
    UrlCitation,
    Usage,
    refuse_unsupported,
)
from .reports import citations_of, reuse_of, source_of, spans_of, timing_of
from .schemas import Source
from .service import Service
from .settings import LimitsConfig
from .tenants import Tenant
from .work import Call


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat request."""

    service: Service
    request: HTTPRequest
    who: Principal
    body: ChatRequest
    session_id: str | None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self) -> None:
        """Raise `ApiError` for what can be refused before any work."""
        body, limits = self.body, self.service.config.limits
        refuse_unsupported(body)
        if body.model != self.service.model_id:
            raise ApiError(
                404,
                f"There is no model {body.model[:80]!r} here; there is {self.service.model_id!r}.",
                code="model_not_found",
                param="model",
            )
        if not any(message.role == "user" for message in body.messages):
            raise ApiError(400, "There is no user message: somebody must ask.", param="messages")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options are of streams: set stream, or leave them out.", param="stream_options")
        for number, message in enumerate(body.messages):
            check_text(message.text, limits, f"messages.{number}")
        if len(body.stops) > limits.stop_strings:
            raise ApiError(
                400, f"stop has {len(body.stops)} strings; this server takes {limits.stop_strings}.", param="stop"
            )
        self._check_documents(limits)
        self.max_tokens  # noqa: B018 - raises

    def _check_documents(self, limits: LimitsConfig) -> None:
        given = self.body.documents or []
        check_count(len(given) + (self.body.rag.k if self.body.rag else 0), limits, "documents")
        for number, document in enumerate(given):
            if len(document.text) > limits.document_chars:
                raise ApiError(
                    400,
                    f"documents.{number} has {len(document.text)} characters; this server takes "
                    f"{limits.document_chars}.",
                    param=f"documents.{number}.text",
                )

    @property
    def max_tokens(self) -> int:
        """Tokens of the answer, at most."""
        body, limits = self.body, self.service.config.limits
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one.", param="max_tokens")
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        return max_tokens_of(body.max_completion_tokens or body.max_tokens, limits, name)

    def events(self, call: Call) -> Generator[str | ChatResponse, None, None]:
        """Pieces of the answer's text as they become certain, then the whole response."""
        with self.service.tenant(self.who) as tenant, session_of(tenant, self.who, self.session_id):
            yield from self._events(call, tenant)

    def _events(self, call: Call, tenant: Tenant) -> Generator[str | ChatResponse, None, None]:
        sources = self._sources(tenant)
        asked = self._asked(tenant, sources)
        answer = None
        markers = Markers(len(sources))
        events = self._answering(call, tenant, asked)
        try:
            with closing(events):
                for said in events:
                    if isinstance(said, TokenEvent):
                        if text := markers.add(said.text):
                            yield text
                    elif isinstance(said, Answer):
                        answer = said  # handed on when the session is free again
        finally:
            if answer is None:
                tenant.dialogue.drop_turn(asked)
        assert answer is not None
        tenant.dialogue.save_turn(asked, answer.text)
        if text := markers.finish():
            yield text
        citations = citations_of(markers.text, sources)
        if text := behind(markers.text, citations):
            yield text
        if self.body.rag is not None:
            tenant.collections.let_go_if_gone(self.body.rag.collection, [source.text for source in sources])
        yield self._response(tenant, asked, answer, markers.text + text, sources)

    def _answering(
        self, call: Call, tenant: Tenant, asked: DialoguePrompt
    ) -> Generator[Prefill | TokenEvent | Answer, None, None]:
        body, fusion = self.body, self.body.ragkv
        ratio = fusion.ratio if fusion is not None and "ratio" in fusion.model_fields_set else UNSET
        return answering(
            call,
            self.request,
            tenant.engine,
            self.service.config.limits,
            asked.question,
            asked.chunks,
            asked.conversation.session if asked.conversation else None,
            max_new_tokens=self.max_tokens,
            stop=body.stops,
            seed=body.seed,
            ratio=ratio,
            selector=fusion.selector if fusion else None,
            reuse=fusion.reuse if fusion else "fused",
            **body.sampling,
        )

    def _sources(self, tenant: Tenant) -> list[Source]:
        """Documents that were given, then those that are found."""
        sources = [
            Source(
                number=number,
                document_id=document.id or f"document-{number}",
                source=document.title or document.id or f"document-{number}",
                title=document.title,
                text=document.text,
                start=0,
                end=len(document.text),
                score=None,
            )
            for number, document in enumerate(self.body.documents or [], 1)
        ]
        if (rag := self.body.rag) is None:
            return sources
        query = next(message.text for message in reversed(self.body.messages) if message.role == "user")
        with tenant.collections.lease(rag.collection) as collection:
            if collection is None:
                raise not_found("collection", rag.collection, "rag.collection")
            hits = collection.rag.retrieve(query, rag.k, retriever=rag.retriever, where=rag.filter, order=rag.order)
        return sources + [source_of(number, hit) for number, hit in enumerate(hits, len(sources) + 1)]

    def _asked(self, tenant: Tenant, sources: Sequence[Source]) -> DialoguePrompt:
        documents = tuple(DialogueDocument(source.text, {"source": source.source}) for source in sources)
        turns = [_turn(message) for message in self.body.messages]
        request = DialogueRequest(insert_documents(turns, documents, tenant.dialogue.separator), documents)
        named = None
        if self.session_id is not None:
            named = tenant.session_name(self.session_id)
            if turns[-1].role != "user":
                raise InputError("With a session the last message must be the user's: it is what is asked.")
        return tenant.dialogue.build_prompt(request, not documents and named is None, named)

    def _response(
        self, tenant: Tenant, asked: DialoguePrompt, answer: Answer, content: str, sources: list[Source]
    ) -> ChatResponse:
        citations = citations_of(content, sources)
        reuse, said = answer.reuse, len(answer.token_ids)
        by_text = {source.text: source.number for source in sources}
        end = tenant.engine.config.prompt.chunk_end
        numbers = [by_text.get(chunk.text.removesuffix(end)) for chunk in _laid(asked.chunks)]
        urls = {source.number: source for source in sources}
        annotations = [
            Annotation(
                url_citation=UrlCitation(
                    url=urls[citation.number].source or citation.document_id,
                    title=urls[citation.number].title or citation.document_id,
                    start_index=start,
                    end_index=stop,
                )
            )
            for citation, start, stop in places(content, citations)
        ]
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=[
                Choice(
                    message=Said(content=content, annotations=annotations),
                    finish_reason=answer.finish_reason,  # type: ignore[arg-type]
                )
            ],
            usage=Usage(
                prompt_tokens=reuse.tokens,
                completion_tokens=said,
                total_tokens=reuse.tokens + said,
                prompt_tokens_details=PromptTokensDetails(cached_tokens=reuse.exact + reuse.fused),
            ),
            ragkv=Report(
                reuse=reuse_of(reuse),
                timing=timing_of(answer.timing),
                prompt=spans_of(answer.spans, numbers),
                citations=citations,
                sources=sources,
                session_id=self.session_id,
            ),
        )


def _turn(message: Message) -> Turn:
    if message.role == "assistant":
        return Turn("assistant", without_markers(message.text))
    return Turn("system" if message.role in ("system", "developer") else "user", message.text)


def _laid(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The chunks as the engine counts them: an opening is none."""
    first = chunks[0] if chunks else None
    return chunks[1:] if isinstance(first, Text) and first.opening else chunks


__all__ = ["Chat"]
