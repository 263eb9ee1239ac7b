"""Request bodies: their content type, their size, and the time they may take; answers must be read in time too."""

import asyncio
import re
import time

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ..errors import ApiError
from .base import HTTPMiddleware

_UPLOAD_PATHS = re.compile(r"/v1/collections/[^/]+/documents/?")


class BodyMiddleware(HTTPMiddleware):
    """Refuses a body of the wrong type, one above the size limit and one that arrives too slowly.

    Bytes are counted as they arrive, whatever content length was announced. The rest of an oversized body is not read.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, headers = self._server.config.limits, Headers(scope=scope)
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > limits.body_bytes:
            raise self._too_large()
        if announced not in ("", "0") or "transfer-encoding" in headers:
            _check_type(headers.get("content-type", ""), scope["path"])
        refused: ApiError | None = None
        received_bytes, deadline = 0, time.monotonic() + limits.body_s
        complete = started = False

        async def receive_counted() -> Message:
            nonlocal refused, received_bytes, complete
            if complete:
                return await receive()  # the next message is a disconnect, which may come at any time
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                refused = ApiError(408, f"The body did not arrive within {limits.body_s:g} s.", "body_timeout")
                raise refused from None
            received_bytes += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if received_bytes > limits.body_bytes:
                refused = self._too_large()
                raise refused
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

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body is larger than {self._server.config.limits.body_bytes} bytes. Send less at a time.",
            "body_too_large",
            headers={"connection": "close"},  # the rest of it is not read
        )


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
