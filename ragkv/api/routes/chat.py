"""/v1/chat/completions: OpenAI's endpoint, with documents. Ollama's chat requests are answered
here, too.

A worker thread turns messages and documents into the engine's prompt, and the answer into OpenAI's
response. Documents are placed before the last user message. With a session, its stored history
replaces all earlier messages. Without one, messages that continue an earlier answer word for word
find its KV by their text. The prompt of a request with documents is not stored for that, because
the messages of the next request will not contain the documents.
"""

import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Self

from fastapi import APIRouter
from fastapi.responses import Response

from ragkv.chat import (
    ChatAnswer,
    ChatDocument,
    ChatInput,
    ChatPrompt,
    PlainMessage,
    insert_documents,
    required_form,
)
from ragkv.errors import InputError
from ragkv.model.decode.token_text import TokenText
from ragkv.prompt import AnswerOptions
from ragkv.prompt.constraints import ResponseFormat
from ragkv.retrieval import Passage
from ragkv.runtime import Claim
from ragkv.types import Citation

from .. import answers
from ..bodies import chat_answer as schemas
from ..bodies.chat import ChatRequest, Message
from ..bodies.parts import notes_of
from ..bodies.resources import AnswerReport, RetrievalBody, SourceBody
from ..bodies.tools import NamedTool, ToolDefinition, called, check_choice
from ..call import ApiCall, ApiCallDep
from ..errors import ApiError
from ..limits import check_at_most
from ..settings import LimitsConfig
from ..sources import (
    annotations_of,
    cited_sources,
    missing_markers,
    source_of,
    sources_of,
    without_markers,
)
from ..sse import DONE, Stream, format_event
from ..tenants import Tenant

router = APIRouter(prefix="/v1", tags=["openai"])

_STREAM = "With `stream`: chat.completion.chunk objects, then `[DONE]`; the last chunk has `ragkv`."


@router.post(
    "/chat/completions",
    summary="Answer a chat",
    response_model=schemas.ChatResponse,
    responses={200: {"description": _STREAM, "content": {"text/event-stream": {}}}},
)
async def chat(body: ChatRequest, call: ApiCallDep) -> schemas.ChatResponse | Response:
    """OpenAI's endpoint. `documents` come with the request, or `rag` finds them; the answer cites
    them as [n].
    """
    completion = ChatCompletion.of(call, body)
    if not body.stream:
        return await call.answer(completion.events, schemas.ChatResponse)
    items = await call.stream(completion.events)
    options = body.stream_options
    with_usage = options is not None and options.include_usage
    head = completion.head

    def show(item: schemas.AnswerPiece | schemas.ChatResponse) -> Iterator[str]:
        if not isinstance(item, schemas.AnswerPiece):
            yield from map(format_event, schemas.last_chunks(item, with_usage))
            yield DONE
            return
        chunk = schemas.chunk_of(head, with_usage, {"content": item.text})
        if item.logprobs:
            chunk["choices"][0]["logprobs"] = {"content": item.logprobs, "refusal": None}
        yield format_event(chunk)

    first = format_event(schemas.chunk_of(head, with_usage, {"role": "assistant", "content": ""}))
    return Stream(items, show, lambda error: format_event(error.body), first)


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One chat request and the way to answer it."""

    call: ApiCall
    body: ChatRequest
    # which passages to find: as `rag` says, by default in the collection that the model's name has
    rag: RetrievalBody | None
    max_tokens: int
    notes: list[str]  # on what the request asks for and does not get
    head: schemas.ChatHead  # what names the answer

    @classmethod
    def of(cls, call: ApiCall, body: ChatRequest) -> Self:
        """The completion of a request. Raises `ApiError` for everything that can be refused before
        any work.
        """
        limits = call.limits
        collection = call.collection_of(body.model)
        rag = body.rag
        if collection is not None and (rag is None or "collection" not in rag.model_fields_set):
            rag = (rag or RetrievalBody()).model_copy(update={"collection": collection})
        _check(body, rag.k if rag else 0, limits)
        max_tokens, cut = answers.max_tokens_of(
            body.max_completion_tokens or body.max_tokens, limits
        )
        parts = [part for message in body.messages for part in message.parts]
        id = f"chatcmpl-{uuid.uuid4().hex}"
        head = schemas.ChatHead(id=id, created=int(time.time()), model=body.model)
        return cls(call, body, rag, max_tokens, notes_of([body, *parts]) + cut, head)

    @property
    def _tools(self) -> Sequence[ToolDefinition]:
        """The tools that the answer may call."""
        return () if self.body.tool_choice == "none" else self.body.tools or ()

    def events(
        self, claim: Claim
    ) -> Generator[schemas.AnswerPiece | schemas.ChatResponse, None, None]:
        """Pieces of the answer as soon as they are certain, then the whole response."""
        asked = [message.text for message in self.body.messages if message.role == "user"]
        with answers.answer_job(self.call, claim, self.body, asked[-1]) as job:
            tenant = job.tenant
            # 1. Refuse a form that cannot be kept, before any work.
            form = self._form(tenant)
            # 2. Find the documents and build the prompt.
            notes = [
                *tenant.unread_passages(claim.check)
            ]  # it may wait, so before a place is taken
            with tenant.preparing(claim.check):
                if self.rag is not None:
                    param = "rag.collection" if self.body.rag else "model"
                    before = asked[-2] if len(asked) > 1 else ""
                    job.retrieve(asked[-1], self.rag, param, before)
                sources = self._sources(job.found)
                prompt = self._prompt(job, sources)
            # 3. Answer, without the text of calls. Then the turn is saved.
            tokens = TokenText(tenant.engine.tokenizer) if self.body.logprobs else None
            steps = tenant.chat.follow(
                prompt,
                job.stream(prompt.question, prompt.pieces, prompt.session, **self._options(form)),
                [tool.function.name for tool in self._tools],
                only_calls=form is not None and not form.schema,
            )
            with closing(steps):
                for step in steps:
                    if isinstance(step, ChatAnswer):
                        chat_answer = step
                        continue
                    given = [step.logprob] if step.logprob else []
                    logprobs = tokens.entries(given) if tokens else []
                    if step.text or logprobs:
                        yield schemas.AnswerPiece(step.text, logprobs)
            # 4. Append the markers of sources that the answer cites and does not name, but not to
            #    JSON, where [1] is a list.
            cited = cited_sources(chat_answer.text, sources)
            markers = ""
            if not chat_answer.found.calls and form is None:
                markers = missing_markers(chat_answer.text, sources, cited)
            if markers:
                yield schemas.AnswerPiece(markers)
            notes += self._without_documents(tenant, prompt)
            content = chat_answer.text + markers
            yield self._response(tokens, prompt, chat_answer, content, sources, cited, notes)

    def _sources(self, found: answers.Found) -> list[SourceBody]:
        """The documents of the request, then those that were found."""
        sources = list[SourceBody]()
        for number, given in enumerate(self.body.documents or [], 1):
            id = given.id or f"document-{number}"
            passage = Passage(
                "", id, given.text, (0, len(given.text)), given.title or id, {"title": given.title}
            )
            sources.append(source_of(number, passage))
        return sources + sources_of(found.hits, len(sources) + 1)

    def _prompt(self, job: answers.AnswerJob, sources: Sequence[SourceBody]) -> ChatPrompt:
        """The messages with the sources, as the engine takes them. What was found keeps its ids."""
        chat = job.tenant.chat
        found = job.found.chunks
        ids = [()] * (len(sources) - len(found)) + [chunk.token_ids for chunk in found]
        documents = tuple(
            ChatDocument(one.text, {"source": one.source, "number": one.number}, token_ids)
            for one, token_ids in zip(sources, ids, strict=True)
        )
        turns = [_plain(message) for message in self.body.messages]
        tools = tuple(tool.for_prompt for tool in self.body.tools or ())
        given = ChatInput(insert_documents(turns, documents, chat.separator), documents, tools)
        if job.session is None:
            # The next request's messages will not hold the documents, so such a conversation is not
            # kept.
            return chat.build_prompt(given, not documents, None)
        if turns[-1].role not in ("user", "tool"):
            raise InputError(
                "With a session the last message must be the user's or a tool's: it is the "
                "question."
            )
        return chat.build_prompt(given, False, job.session)

    def _options(self, form: ResponseFormat | None) -> AnswerOptions:
        return {
            **self.body.engine_options,
            "response_format": form,
            "max_new_tokens": self.max_tokens,
            "separator": "",  # the messages have their own text between passages
        }

    def _form(self, tenant: Tenant) -> ResponseFormat | None:
        """The form of the answer: of its text, of calls if it must call a tool, or of either.
        Raises `SchemaError`.
        """
        tools = [tool.for_prompt for tool in self._tools]
        choice = self.body.tool_choice
        text = self.body.parsed_form()
        may_be_text = choice in (None, "auto")
        if not tools or (may_be_text and text is None):
            return text
        name = choice.function.name if isinstance(choice, NamedTool) else None
        syntax = tenant.chat.template_for(tools).call_syntax
        calls = required_form(tools, name, syntax, bool(self.body.parallel_tool_calls))
        return text.or_calls(calls) if may_be_text and text is not None else calls

    def _without_documents(self, tenant: Tenant, prompt: ChatPrompt) -> list[str]:
        """A note if the answer is the model's alone, although there are documents."""
        if prompt.documents:
            return []
        if self.rag is not None:
            return [answers.nothing_found(self.rag.collection)]
        names = tenant.collections.folders.names()
        if not names or self.body.documents:
            return []
        model = self.call.service.model_id
        return [
            f"answered without documents, as the model {model} does; {model}:{names[0]} answers "
            f"from the collection {names[0]}"
        ]

    def _response(
        self,
        tokens: TokenText | None,
        prompt: ChatPrompt,
        chat_answer: ChatAnswer,
        content: str,
        sources: list[SourceBody],
        cited: Sequence[Citation],
        notes: Sequence[str],
    ) -> schemas.ChatResponse:
        answer = chat_answer.answer
        calls = chat_answer.found.calls
        numbers = [chunk.metadata.get("number") for chunk in prompt.documents]
        report = AnswerReport(
            **answers.answer_fields(answer, content, sources, cited, numbers, self.body.session_id),
            notes=[*self.notes, *notes],
        )
        collection = self.rag.collection if self.rag else None
        choice = schemas.Choice(
            message=schemas.AssistantMessage(
                content=None if calls and not content.strip() else content,
                tool_calls=called(calls) if calls else None,
                annotations=annotations_of(
                    content, report, collection, len(self.body.documents or [])
                ),
            ),
            logprobs=schemas.Logprobs(content=tokens.entries(answer.logprobs)) if tokens else None,  # type: ignore[arg-type]
            finish_reason="tool_calls"
            if calls and answer.finish_reason == "stop"
            else answer.finish_reason,  # type: ignore[arg-type]
        )
        used = answer.reuse
        usage = schemas.UsageBody(
            prompt_tokens=used.tokens,
            completion_tokens=len(answer.token_ids),
            total_tokens=used.tokens + len(answer.token_ids),
            prompt_tokens_details=schemas.PromptTokensDetails(
                cached_tokens=used.exact + used.fused
            ),
        )
        return schemas.ChatResponse(**dict(self.head), choices=[choice], usage=usage, ragkv=report)


def _check(body: ChatRequest, wanted: int, limits: LimitsConfig) -> None:
    """Raise `ApiError` for a request that is refused; `wanted`: the number of passages to find."""
    if not any(message.role == "user" for message in body.messages):
        raise ApiError(
            400, "There is no user message: the prompt needs a question.", param="messages"
        )
    for number, message in enumerate(body.messages):
        answers.check_text(message.text, limits, f"messages.{number}")
    documents = body.documents or []
    check_at_most(len(documents) + wanted, limits.documents, "documents", "documents")
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
    body.parsed_form()
    if body.tools or body.tool_choice:
        check_choice(body.tools or (), body.tool_choice)


def _plain(message: Message) -> PlainMessage:
    """A message as plain text. Raises `ApiError` for a call whose arguments are no JSON object."""
    if message.role == "assistant":
        calls = tuple(given.call for given in message.tool_calls or ())
        return PlainMessage("assistant", without_markers(message.text), calls)
    role = "system" if message.role == "developer" else message.role
    call_id = message.tool_call_id or ""
    return PlainMessage(role, message.text, call_id=call_id, name=message.name or "")
