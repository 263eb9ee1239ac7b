"""The server-sent events of one response, in OpenAI's order: the response, its message as text comes, its calls.

All arguments of a call are one delta. An error ends the stream with the event `error`.
"""

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from .bodies.values import Piece
from .errors import as_api_error
from .model_response import ModelResponse
from .openai_responses import OutputCall, OutputMessage, OutputText, ResponseObject
from .sse import format_event


class ResponseStream:
    """Makes the events of one response; each has the next sequence number."""

    def __init__(self, turn: ModelResponse) -> None:
        self._turn = turn
        self._number = 0
        self._held: list[Piece] = []  # blank text at the beginning: an answer of calls alone has no message
        self._opened = False  # whether the message was announced

    async def texts(self, items: AsyncGenerator[Piece | ResponseObject, None]) -> AsyncGenerator[str, None]:
        """The events as text, of the pieces and the response that `ModelResponse.events` gives."""
        try:
            begun = self._turn.begun().model_dump()
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=begun)
            async for item in items:
                for text in self._piece(item) if isinstance(item, Piece) else self._end(item):
                    yield text
        except Exception as error:
            detail = as_api_error(error).body["error"]
            told = {name: detail[name] for name in ("code", "message", "param")}
            yield self._event("error", **told, error=detail)  # clients raise what is in `error`
        finally:
            await items.aclose()

    def _event(self, kind: str, **fields: Any) -> str:
        text = format_event({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return text

    def _piece(self, piece: Piece) -> Iterator[str]:
        self._held.append(piece)
        if self._opened or any(one.text.strip() for one in self._held):
            yield from self._open()
            yield from self._deltas()

    def _open(self) -> Iterator[str]:
        """Announce the message, once."""
        if self._opened:
            return
        self._opened = True
        message = OutputMessage(id=self._turn.message_id, status="in_progress", content=[])
        yield self._event("response.output_item.added", output_index=0, item=message.model_dump())
        empty = OutputText(text="", annotations=[], logprobs=[])
        yield self._event("response.content_part.added", **self._place, part=empty.model_dump())

    def _deltas(self) -> Iterator[str]:
        for piece in self._held:
            logprobs = [dict(entry) for entry in piece.logprobs]
            yield self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=logprobs)
        self._held.clear()

    @property
    def _place(self) -> dict[str, Any]:
        """Where the message's text is in the response."""
        return {"item_id": self._turn.message_id, "output_index": 0, "content_index": 0}

    def _end(self, response: ResponseObject) -> Iterator[str]:
        for index, item in enumerate(response.output):
            yield from self._message(item) if isinstance(item, OutputMessage) else self._call(item, index)
            yield self._event("response.output_item.done", output_index=index, item=item.model_dump())
        yield self._event(f"response.{response.status}", response=response.model_dump())

    def _message(self, message: OutputMessage) -> Iterator[str]:
        (text,) = message.content
        yield from self._open()
        yield from self._deltas()
        for index, annotation in enumerate(text.annotations):
            fields = {**self._place, "annotation_index": index, "annotation": annotation.model_dump()}
            yield self._event("response.output_text.annotation.added", **fields)
        part = text.model_dump()
        yield self._event("response.output_text.done", **self._place, text=text.text, logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place, part=part)

    def _call(self, call: OutputCall, index: int) -> Iterator[str]:
        begun = call.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._event("response.output_item.added", output_index=index, item=begun.model_dump())
        place = {"item_id": call.id, "output_index": index}
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        told = {"name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **place, **told)
