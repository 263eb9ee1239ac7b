"""One request of /v1/responses: it becomes a chat completion, and its answer a response that is stored.

A stored response has the turns of its conversation. A request that continues it brings new ones, and the prompt is made
of all of them, with the request's own instructions. The chat completion finds their KV by their text.
"""

import logging
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ragkv.api.chat import DialogueDocument, Turn, insert_documents
from ragkv.errors import SchemaError

from .answers import check_text
from .bodies.chat import AssistantMessage, ChatRequest, ChatResponse, Message, refuse_unsupported
from .bodies.tools import GivenCall, GivenFunction
from .bodies.values import Piece
from .chat_completion import ChatCompletion, turn_of
from .errors import ApiError, check_at_most, not_found
from .keys import Principal
from .openai_response_items import MOST_ITEMS, ContentPart, InputCall, InputCallOutput, InputMessage
from .openai_responses import (
    IncompleteDetails,
    NamedChoice,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
    TextAnnotation,
)
from .service import Service
from .stored_responses import StoredResponse
from .work.work_context import WorkContext

log = logging.getLogger(__name__)

_FIELDS = {  # of a chat request, and what they are called here
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """One request and the way to answer it."""

    service: Service
    principal: Principal
    body: ResponseRequest
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def message_id(self) -> str:
        """The id of the message among the items of the answer."""
        return self.id.replace("resp_", "msg_", 1)

    def check(self) -> None:
        """Raise `ApiError` for what can be refused before any work; `events` refuses the rest before its first item."""
        body, limits = self.body, self.service.config.limits
        refuse_unsupported(body)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options require stream; set stream, or leave them out.", param="stream_options")
        check_text(body.instructions or "", limits, "instructions")
        if isinstance(body.input, str):
            check_text(body.input, limits, "input")
        else:
            for number, message in enumerate(self._messages()):
                check_text(message.text, limits, f"input.{number}")

    def events(self, context: WorkContext) -> Generator[Piece | ResponseObject, None, None]:
        """Pieces of the answer's text as soon as they are certain, then the whole response."""
        with _named_as_here():
            earlier = self._earlier()
            completion = self._completion(earlier)
            completion.check()
            for item in completion.events(context):
                if isinstance(item, ChatResponse):
                    yield self._finished(item, earlier)
                else:
                    yield item

    def begun(self) -> ResponseObject:
        """The response before its answer."""
        body = self.body
        written = body.text.format if body.text else None
        return ResponseObject(
            id=self.id,
            created_at=self.created,
            status="in_progress",
            model=body.model,
            output=[],
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=body.temperature,
            top_p=body.top_p,
            top_logprobs=body.top_logprobs or 0,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice.model_dump()
            if isinstance(body.tool_choice, NamedChoice)
            else body.tool_choice or "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
            text={"format": written.model_dump(by_alias=True, exclude_none=True) if written else {"type": "text"}},
        )

    def _earlier(self) -> tuple[Turn, ...]:
        """The turns of the response that this one continues. Raises `ApiError` 404 if it is not stored."""
        name = self.body.previous_response_id
        if name is None:
            return ()
        with self.service.tenants.lease(self.principal) as tenant:
            stored = tenant.responses.load(name)
        if stored is None:
            raise not_found("stored response", name, "previous_response_id")
        return stored.turns

    def _completion(self, earlier: Sequence[Turn]) -> ChatCompletion:
        """The chat completion of all turns."""
        body = self.body
        messages = [*map(_message_of, earlier), *self._messages()]
        check_at_most(len(messages), MOST_ITEMS, "input", "items, with those of earlier responses,")
        if body.instructions:
            messages.insert(0, Message(role="system", content=body.instructions))
        shared = {name: getattr(body, name) for name in ChatRequest.model_fields.keys() & ResponseRequest.model_fields}
        choice = body.tool_choice
        shared |= {
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": bool(body.include) or body.top_logprobs is not None or None,
            "response_format": body.text.format.response_format if body.text and body.text.format else None,
            "tools": [tool.definition for tool in body.tools] if body.tools else None,
            "tool_choice": choice.choice if isinstance(choice, NamedChoice) else choice,
            "stream_options": None,
            "metadata": None,
            "store": None,
        }
        request = ChatRequest.model_construct(**shared)
        return ChatCompletion(self.service, self.principal, request, None, checked=True, keeps=body.store is not False)

    def _messages(self) -> list[Message]:
        """The items of the request as messages."""
        if isinstance(self.body.input, str):
            return [Message(role="user", content=self.body.input)]
        messages: list[Message] = []
        for item in self.body.input:
            if isinstance(item, InputMessage):
                messages.append(Message(role=item.role, content=_text(item.content)))
            elif isinstance(item, InputCallOutput):
                messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            else:
                _add_call(messages, item)
        return messages

    def _finished(self, chat: ChatResponse, earlier: Sequence[Turn]) -> ResponseObject:
        """The response, stored if that was not refused."""
        (choice,) = chat.choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        response = self.begun().model_copy(
            update={
                "status": status,
                "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
                "output": self._output(choice.message, status, choice.logprobs.content if choice.logprobs else []),
                "usage": ResponseUsage.of(chat.usage),
                "ragkv": chat.ragkv,
            }
        )
        return self._stored(response, chat, earlier) if response.store else response

    def _stored(self, response: ResponseObject, chat: ChatResponse, earlier: Sequence[Turn]) -> ResponseObject:
        """The response, stored; or with a note that says why it is not."""
        assert response.ragkv is not None
        documents = [DialogueDocument(source.text, {}) for source in chat.ragkv.sources]
        answer = chat.choices[0].message
        said = Message(
            role="assistant",
            content=answer.content,
            tool_calls=[_given(call) for call in answer.tool_calls or ()] or None,
        )
        with self.service.tenants.lease(self.principal) as tenant:
            asked = insert_documents([*earlier, *map(turn_of, self._messages())], documents, tenant.dialogue.separator)
            shown = response.model_dump(exclude={"ragkv"})
            tools = tuple(tool.definition.for_prompt for tool in self.body.tools or ())
            stored = StoredResponse(shown, (*asked, turn_of(said)), self.body.instructions or "", tools)
            limit = tenant.quotas.limit(self.principal, "sessions")
            try:
                if limit != 0:
                    tenant.responses.save(stored, limit)
                    return response
                why = "quotas.sessions is 0"
            except OSError:
                log.exception("response_not_stored")
                why = "it could not be written; the server's log says why"
        report = response.ragkv.model_copy(update={"notes": [*response.ragkv.notes, f"not stored: {why}"]})
        return response.model_copy(update={"store": False, "ragkv": report})

    def _output(
        self, message: AssistantMessage, status: str, logprobs: Sequence[object]
    ) -> list[OutputMessage | OutputCall]:
        """The items of an answer: its text, unless it is nothing but calls, and its calls."""
        output: list[OutputMessage | OutputCall] = []
        if message.content is not None:
            annotations = [TextAnnotation(**one.url_citation.model_dump()) for one in message.annotations]
            text = OutputText(text=message.content, annotations=annotations, logprobs=list(logprobs))  # type: ignore[arg-type]
            output.append(OutputMessage(id=self.message_id, status=status, content=[text]))  # type: ignore[arg-type]
        for call in message.tool_calls or ():
            output.append(
                OutputCall(
                    id=f"fc_{call.id}",
                    call_id=call.id,
                    name=call.function.name,
                    arguments=call.function.arguments,
                    status="completed",
                )
            )
        return output


def _text(content: str | Sequence[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _add_call(messages: list[Message], item: InputCall) -> None:
    """Add a call to the message of the assistant before it, or to a new one."""
    function = GivenFunction(name=item.name, arguments=item.arguments)
    call = GivenCall(id=item.call_id, function=function)
    if messages and messages[-1].role == "assistant":
        messages[-1] = messages[-1].model_copy(update={"tool_calls": [*(messages[-1].tool_calls or ()), call]})
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _given(call: object) -> GivenCall:
    return GivenCall.model_validate(call.model_dump())  # type: ignore[attr-defined]


def _message_of(turn: Turn) -> Message:
    """A stored turn as a message."""
    calls = [
        GivenCall(id=call.id, function=GivenFunction(name=call.name, arguments=call.arguments)) for call in turn.calls
    ]
    return Message(
        role=turn.role,  # type: ignore[arg-type]
        content=turn.text,
        name=turn.name or None,
        tool_calls=calls or None,
        tool_call_id=turn.call_id or None,
    )


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Raise errors of the chat completion with the names that fields have in this request."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error) from error
    except SchemaError as error:
        if error.param in _FIELDS:
            error.param = _FIELDS[error.param]
        raise


def _renamed(error: ApiError) -> ApiError:
    first, *rest = (error.param or "").split(".")
    if first not in _FIELDS:
        return error
    param = ".".join([_FIELDS[first], *rest])
    message = error.message.replace(first, _FIELDS[first])
    return ApiError(error.status, message, error.code, param, error.retry_after_s, error.headers)
