"""Request bodies: type, size, number of JSON values, and the time they may take; answers must be read in time too."""

import asyncio
import re
import time

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ..errors import ApiError
from ..settings import LimitsConfig
from .base import HTTPMiddleware

_UPLOAD_PATHS = re.compile(r"/v1/collections/[^/]+/documents/?")
# Bodies of these paths are parsed in processes of their own.
_DOCUMENT_PATHS = re.compile(r"/v1/collections/[^/]+/documents(/.*)?")


def count_values(body: bytes) -> int:
    """About how many values a JSON text holds, commas in strings included: a fast bound of the work of parsing it."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


class BodyMiddleware(HTTPMiddleware):
    """Refuses a body of the wrong type, one above the limits on bytes and values, and one that arrives too slowly.

    Bytes are counted as they arrive, whatever content length was announced. The rest of an oversized body is not read.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, headers = self._server.config.limits, Headers(scope=scope)
        holds_documents = _DOCUMENT_PATHS.fullmatch(scope["path"]) is not None
        announced = headers.get("content-length", "")
        if announced.isdigit():
            _check_size(int(announced[:20]), limits, holds_documents)
        if announced not in ("", "0") or "transfer-encoding" in headers:
            _check_type(headers.get("content-type", ""), scope["path"])
        refused: ApiError | None = None
        received_bytes = values = 0
        deadline: float | None = None  # from the first reading on: an upload may have waited until it was read
        complete = started = False

        async def receive_counted() -> Message:
            nonlocal refused, received_bytes, values, deadline, complete
            if complete:
                return await receive()  # the next message is a disconnect, which may come at any time
            deadline = deadline or time.monotonic() + limits.body_s
            left_s = max(0.0, deadline - time.monotonic())
            try:
                async with asyncio.timeout(min(left_s, limits.body_idle_s)):
                    message = await receive()
            except TimeoutError:
                refused = _too_late(limits, left_s <= limits.body_idle_s)
                raise refused from None
            piece = message.get("body", b"")
            received_bytes += len(piece)
            values += 0 if holds_documents else count_values(piece)
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            try:
                _check_size(received_bytes, limits, holds_documents)
                _check_values(values, limits)
            except ApiError as error:
                refused = error
                raise
            return message

        async def send_timely(message: Message) -> None:
            nonlocal started
            if refused is not None and not started:
                return  # drop the route's answer to a broken body; `refused` is answered instead
            started = True
            async with asyncio.timeout(limits.stall_s):
                await send(message)

        try:
            await self._app(scope, receive_counted, send_timely)
        except Exception:
            if refused is None or started:
                raise
        if refused is not None and not started:
            raise refused


def _check_size(size: int, limits: LimitsConfig, holds_documents: bool) -> None:
    """Raise `ApiError` 413 for a body of too many bytes."""
    setting = "body_bytes" if holds_documents or limits.body_bytes <= limits.json_bytes else "json_bytes"
    if size > (most := getattr(limits, setting)):
        raise _too_large(f"is larger than {most} bytes (limits.{setting})")


def _check_values(values: int, limits: LimitsConfig) -> None:
    """Raise `ApiError` 413 for a JSON body of too many values, which are much work to parse however short they are."""
    if values > limits.json_values:
        raise _too_large(f"has more than {limits.json_values} commas and opening brackets (limits.json_values)")


def _too_late(limits: LimitsConfig, in_all: bool) -> ApiError:
    if in_all:
        why = f"The body did not arrive within {limits.body_s:g} s (limits.body_s)."
    else:
        why = f"Nothing of the body arrived for {limits.body_idle_s:g} s (limits.body_idle_s)."
    return ApiError(408, why, "body_timeout", headers={"connection": "close"})


def _too_large(problem: str) -> ApiError:
    closing = {"connection": "close"}  # the rest of it is not read
    return ApiError(413, f"The body {problem}. Send less at a time.", "body_too_large", headers=closing)


def _check_type(content_type: str, path: str) -> None:
    """Raise `ApiError` 415 unless the body is JSON, or a form where files are uploaded.

    A foreign web page cannot send JSON without the server's consent (CORS), but it can send forms.
    """
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charsets = [p.partition("=")[2].strip('"') for p in parameters if p.startswith("charset=")]
    if kind == "application/json" and all(charset in ("utf-8", "utf8") for charset in charsets):
        return
    takes_forms = _UPLOAD_PATHS.fullmatch(path) is not None
    if takes_forms and kind == "multipart/form-data":
        return
    accepted = "application/json (UTF-8)" + (" or multipart/form-data" if takes_forms else "")
    raise ApiError(415, f"The content type {content_type[:100]!r} is not accepted here; send {accepted}.")
