"""One chat completion in a worker thread: from messages and documents to the engine's prompt, and
back to OpenAI's response.

Documents stand before the last user message. With a session, its stored history replaces all
earlier messages. Without one, messages that continue an earlier answer word for word find its KV by
their text. If the request has documents, its prompt is not stored for that: the messages of the
next request will not contain the documents.
"""

import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import quote

from ragkv.chat import (
    CallFilter,
    ChatDocument,
    ChatInput,
    ChatPrompt,
    FoundCalls,
    PlainMessage,
    find_calls,
    insert_documents,
    required_form,
)
from ragkv.conversations import Session
from ragkv.errors import InputError
from ragkv.model.decode.token_text import TokenText
from ragkv.prompt import AnswerOptions
from ragkv.prompt.constraints import ResponseFormat
from ragkv.retrieval import Passage
from ragkv.retrieval.rag import question_before
from ragkv.runtime import Check
from ragkv.types import Answer, Chunk, Text, TokenEvent

from .answers import check_text, max_tokens_of, nothing_found, retrieve, session_of, stream_answer
from .bodies.chat import ChatRequest, Message
from .bodies.chat_answer import (
    Annotation,
    AssistantMessage,
    ChatResponse,
    Choice,
    Logprobs,
    Piece,
    UrlCitation,
    UsageBody,
)
from .bodies.client_parts import notes_of
from .bodies.resources import AnswerReport, RetrievalBody, SourceBody
from .bodies.tools import NamedTool, ToolDefinition, called, check_choice
from .errors import ApiError, check_at_most
from .keys import Principal
from .reports import (
    answer_fields,
    citations_of,
    missing_markers,
    source_of,
    sources_of,
    without_markers,
)
from .service import Service
from .tenants import Tenant
from .work import WorkContext


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One chat request and the way to answer it."""

    service: Service
    principal: Principal
    body: ChatRequest
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self) -> None:
        """Raise `ApiError` for everything that can be refused before any work."""
        body = self.body
        limits = self.service.config.limits
        rag = self._rag
        if not any(message.role == "user" for message in body.messages):
            raise ApiError(
                400, "There is no user message: the prompt needs a question.", param="messages"
            )
        for number, message in enumerate(body.messages):
            check_text(message.text, limits, f"messages.{number}")
        documents = body.documents or []
        check_at_most(
            len(documents) + (rag.k if rag else 0), limits.documents, "documents", "documents"
        )
        for number, document in enumerate(documents):
            check_at_most(
                len(document.text), limits.document_chars, f"documents.{number}.text", "characters"
            )
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs need logprobs: set it to true.", param="top_logprobs")
        if None not in (old := body.max_tokens, new := body.max_completion_tokens) and old != new:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ; give one.", param="max_tokens"
            )
        body.form  # noqa: B018 - it raises
        if body.tools or body.tool_choice:
            check_choice(body.tools or (), body.tool_choice)

    @property
    def _max_tokens(self) -> tuple[int, list[str]]:
        """The most tokens of the answer, and notes on them."""
        return max_tokens_of(
            self.body.max_completion_tokens or self.body.max_tokens, self.service.config.limits
        )

    @property
    def _rag(self) -> RetrievalBody | None:
        """Which passages to find: as `rag` says, by default in the collection that the model's name
        has.

        Raises `ApiError` for an unknown model.
        """
        collection = self.service.collection_of(self.body.model)
        given = self.body.rag
        if collection is None or (given is not None and "collection" in given.model_fields_set):
            return given
        return (given or RetrievalBody()).model_copy(update={"collection": collection})

    @property
    def _tools(self) -> Sequence[ToolDefinition]:
        """The tools that the answer may call."""
        return () if self.body.tool_choice == "none" else self.body.tools or ()

    @property
    def _question(self) -> str:
        """The text of the last user message."""
        return next(
            message.text for message in reversed(self.body.messages) if message.role == "user"
        )

    def events(self, context: WorkContext) -> Generator[Piece | ChatResponse, None, None]:
        """Pieces of the answer as soon as they are certain, then the whole response."""
        with self.service.tenants.lease(self.principal) as tenant:
            # it holds the title
            session = session_of(tenant, self.principal, self.body.session_id, self._question)
            yield from self._events(context, tenant, self._before(tenant, session))
            tenant.engine.settle(context.cancelled)  # a stream has ended for its client by now

    def _events(
        self, context: WorkContext, tenant: Tenant, before: str
    ) -> Generator[Piece | ChatResponse, None, None]:
        # 1. Find the documents and build the prompt.
        with tenant.preparing(context.check):
            sources = self._sources(tenant, context.check, before)
            left_out = tenant.known_passages.refresh()
            prompt = self._prompt(tenant, sources)
        # 2. Stream the answer.
        form = self._form(tenant)
        names = [tool.function.name for tool in self._tools]
        tokens = TokenText(tenant.engine.tokenizer) if self.body.logprobs else None
        answer: Answer | None = None
        options: AnswerOptions = {
            **self.body.engine_options,
            "response_format": form,
            "max_new_tokens": self._max_tokens[0],
            "separator": "",  # the messages have their own text between passages
        }
        session = prompt.conversation.session if prompt.conversation else None
        content = ""  # what was sent of the answer
        filtered = CallFilter(form is not None and not form.schema) if names else None
        try:
            made = stream_answer(
                context, tenant.engine, prompt.question, prompt.chunks, session, **options
            )
            with closing(made) as events:
                for event in events:
                    if isinstance(event, TokenEvent):
                        logprobs = (
                            tokens.entries([event.logprob]) if tokens and event.logprob else []
                        )
                        text = event.text if filtered is None else filtered.add(event.text)
                        content += text
                        if text or logprobs:
                            yield Piece(text, logprobs)
                    elif isinstance(event, Answer):
                        answer = event  # sent after the loop, when the session is free again
        finally:
            if answer is None:  # it failed
                tenant.chat.drop_turn(prompt)
        assert answer is not None
        # 3. Save the turn, so that messages which continue it find its KV.
        found = (
            find_calls(answer.text, names, answer.finish_reason)
            if names
            else FoundCalls(answer.text)
        )
        answer = tenant.chat.save_turn(prompt, answer, found.text, found.calls)
        # 4. Take calls out of the text. Append the markers of sources that the answer cites and
        #    does not name, but not to JSON, where [1] is a list.
        left = "" if filtered is None else found.behind(filtered.sent)
        if not found.calls and form is None:
            left += missing_markers(content + left, citations_of(content + left, sources))
        content += left
        if left:
            yield Piece(left)
        if (rag := self._rag) is not None:
            tenant.collections.drop_if_deleted(rag.collection, [source.text for source in sources])
        response = self._response(tenant, prompt, answer, content, sources, found)
        response.ragkv.notes += [*left_out, *self._without_documents(tenant, prompt)]
        yield response

    def _form(self, tenant: Tenant) -> ResponseFormat | None:
        """The form of the answer: of its text, of calls if it must call a tool, or of either.
        Raises `SchemaError`.
        """
        tools = [tool.for_prompt for tool in self._tools]
        choice = self.body.tool_choice
        text = self.body.form
        may_be_text = choice in (None, "auto")
        if not tools or (may_be_text and text is None):
            return text
        name = choice.function.name if isinstance(choice, NamedTool) else "required"
        syntax = tenant.chat.template_for(tools).call_syntax
        calls = required_form(tools, name, syntax, bool(self.body.parallel_tool_calls))
        return (
            text.or_calls(calls)
            if may_be_text and text is not None and calls is not None
            else calls
        )

    def _before(self, tenant: Tenant, session: Session | None) -> str:
        """The question before, of the stored conversation or of the messages; "" if this is the
        first.
        """
        if session is not None:
            return question_before(session, tenant.engine.tokenizer)
        asked = [message.text for message in self.body.messages if message.role == "user"]
        return asked[-2] if len(asked) > 1 else ""

    def _sources(self, tenant: Tenant, check: Check, before: str) -> list[SourceBody]:
        """The documents of the request, then those that retrieval finds."""
        sources = []
        for number, given in enumerate(self.body.documents or [], 1):
            id = given.id or f"document-{number}"
            passage = Passage(
                "", id, given.text, (0, len(given.text)), given.title or id, {"title": given.title}
            )
            sources.append(source_of(number, passage))
        if (rag := self._rag) is None:
            return sources
        hits, _ = retrieve(
            tenant,
            self._question,
            rag,
            check,
            "rag.collection" if self.body.rag else "model",
            before,
        )
        return sources + sources_of(hits, len(sources) + 1)

    def _annotations(self, content: str, report: AnswerReport) -> list[Annotation]:
        """The citations whose marker is in `content`."""
        given = len(self.body.documents or [])
        rag = self._rag
        found: list[Annotation] = []
        for one in report.citations:
            start, end = one.answer_start, one.answer_end
            if start is None or end is None or content[start:end] != f"[{one.number}]":
                continue
            source = next(each for each in report.sources if each.number == one.number)
            citation = UrlCitation(
                url=_address(source, rag.collection if rag and one.number > given else None),
                title=source.title or one.document_id,
                start_index=start,
                end_index=end,
            )
            found.append(Annotation(url_citation=citation))
        return found

    def _without_documents(self, tenant: Tenant, prompt: ChatPrompt) -> list[str]:
        """A note if the answer is the model's alone, although there are documents to answer from."""
        if prompt.documents:
            return []
        if (rag := self._rag) is not None:
            return [nothing_found(rag.collection)]
        names = tenant.collections.folders.names()
        if not names or self.body.documents:
            return []
        model = self.service.model_id
        return [
            f"answered without documents, as the model {model} does; {model}:{names[0]} answers "
            f"from the collection {names[0]}"
        ]

    def _prompt(self, tenant: Tenant, sources: Sequence[SourceBody]) -> ChatPrompt:
        documents = tuple(
            ChatDocument(source.text, {"source": source.source, "number": source.number})
            for source in sources
        )
        turns = [_plain(message) for message in self.body.messages]
        tools = tuple(tool.for_prompt for tool in self.body.tools or ())
        request = ChatInput(
            insert_documents(turns, documents, tenant.chat.separator), documents, tools
        )
        if self.body.session_id is None:
            # The next request's messages will not hold the documents, so such a conversation is not
            # kept.
            return tenant.chat.build_prompt(request, not documents, None)
        if turns[-1].role not in ("user", "tool"):
            raise InputError(
                "With a session the last message must be the user's or a tool's: it is the "
                "question."
            )
        return tenant.chat.build_prompt(
            request, False, tenant.engine_session_id(self.body.session_id)
        )

    def _response(
        self,
        tenant: Tenant,
        prompt: ChatPrompt,
        answer: Answer,
        content: str,
        sources: list[SourceBody],
        found: FoundCalls,
    ) -> ChatResponse:
        numbers = [chunk.metadata.get("number") for chunk in _without_opening(prompt.chunks)]
        parts = [part for message in self.body.messages for part in message.parts]
        report = AnswerReport(
            **answer_fields(answer, content, sources, numbers, self.body.session_id),
            notes=notes_of([self.body, *parts]) + self._max_tokens[1],
        )
        choice = Choice(
            message=AssistantMessage(
                content=None if found.calls and not content.strip() else content,
                tool_calls=called(found.calls) if found.calls else None,
                annotations=self._annotations(content, report),
            ),
            logprobs=Logprobs(content=TokenText(tenant.engine.tokenizer).entries(answer.logprobs))  # type: ignore[arg-type]
            if self.body.logprobs
            else None,
            finish_reason="tool_calls"
            if found.calls and answer.finish_reason == "stop"
            else answer.finish_reason,  # type: ignore[arg-type]
        )
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=[choice],
            usage=UsageBody.of(answer.reuse, len(answer.token_ids)),
            ragkv=report,
        )


def _address(source: SourceBody, collection: str | None) -> str:
    """Where a source can be read: its origin on the web, or its document on this server.

    Clients make links of it, and the author of a document chooses its origin and its id: a click
    may lead nowhere else. `collection`: where it was found; `None`: the request brought it.
    """
    if source.source.lower().startswith(("http://", "https://")):
        return source.source
    if collection is None:
        return f"#{source.number}"
    return f"/v1/collections/{collection}/documents/{quote(source.document_id, safe='')}"


def _plain(message: Message) -> PlainMessage:
    """A message as plain text. Raises `ApiError` for a call whose arguments are no JSON object."""
    if message.role == "assistant":
        calls = tuple(given.call for given in message.tool_calls or ())
        return PlainMessage("assistant", without_markers(message.text), calls)
    if message.role == "tool":
        return PlainMessage(
            "tool", message.text, call_id=message.tool_call_id or "", name=message.name or ""
        )
    return PlainMessage(
        "system" if message.role in ("system", "developer") else "user", message.text
    )


def _without_opening(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The chunks as the engine numbers them: it does not count an opening text."""
    first = chunks[0] if chunks else None
    return chunks[1:] if isinstance(first, Text) and first.opening else chunks
