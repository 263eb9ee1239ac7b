"""Request bodies: type, size, number of JSON values, and the time they may take; answers must be read in time too."""

import asyncio
import re
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError
from ..keys import Principal
from ..server_state import ServerState
from ..settings import LimitsConfig
from ..work.fair_slots import FairSlots, NoSlotError
from .base import HTTPMiddleware

SMALL_BYTES = 1 << 16  # a body up to this size waits for no slot

_UPLOAD_PATHS = re.compile(r"/v1/collections/[^/]+/documents/?")
# Bodies of these paths are parsed in processes of their own.
_DOCUMENT_PATHS = re.compile(r"/v1/collections/[^/]+/documents(/.*)?")


def count_values(body: bytes) -> int:
    """About how many values a JSON text holds, commas in strings included: a fast bound of the work of parsing it."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


class BodyMiddleware(HTTPMiddleware):
    """Refuses a body of the wrong type, one above the limits on bytes and values, and one that arrives too slowly.

    Bytes are counted as they arrive, whatever content length was announced. The rest of an oversized body is not read.
    Large JSON bodies wait in their sockets until a slot is free, so that their number in memory is bounded.
    """

    def __init__(self, app: ASGIApp, server: ServerState) -> None:
        super().__init__(app, server)
        limits = server.config.limits
        self._slots = FairSlots(limits.json_bodies, limits.tenant_json_bodies)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, headers = self._server.config.limits, Headers(scope=scope)
        holds_documents = _DOCUMENT_PATHS.fullmatch(scope["path"]) is not None
        announced = headers.get("content-length", "")
        if announced.isdigit():
            _check_size(int(announced[:20]), limits, holds_documents)
        if announced not in ("", "0") or "transfer-encoding" in headers:
            _check_type(headers.get("content-type", ""), scope["path"])
        is_small = int(announced[:20]) <= SMALL_BYTES if announced.isdigit() else "transfer-encoding" not in headers
        needs_slot = not holds_documents and not is_small
        slot = self._slots.hold(_tenant_of(scope), limits.body_s / 2) if needs_slot else None
        body, started = _Body(limits, receive, holds_documents, slot), False

        async def send_timely(message: Message) -> None:
            nonlocal started
            if body.refused is not None and not started:
                return  # drop the route's answer to a broken body; `refused` is answered instead
            started = True
            async with asyncio.timeout(limits.stall_s):
                await send(message)

        try:
            await self._app(scope, body.receive, send_timely)
        except Exception:
            if body.refused is None or started:
                raise
        finally:
            await body.release()
        if body.refused is not None and not started:
            raise body.refused


class _Body:
    """A body while it arrives. From its first piece to its last it holds its slot, if it needs one."""

    def __init__(
        self,
        limits: LimitsConfig,
        receive: Receive,
        holds_documents: bool,
        slot: AbstractAsyncContextManager[None] | None,
    ) -> None:
        self.refused: ApiError | None = None
        self._limits, self._receive, self._holds_documents, self._slot = limits, receive, holds_documents, slot
        self._held = AsyncExitStack()
        self._bytes = self._values = 0
        self._deadline: float | None = None  # from the first reading on: the body may have waited until it was read
        self._complete = False

    async def receive(self) -> Message:
        """The next message. Raises `ApiError` if the body is refused."""
        if self._complete:
            return await self._receive()  # the next message is a disconnect, which may come at any time
        try:
            message = await self._next_message()
            self._count(message.get("body", b""))
        except ApiError as error:
            self.refused = error
            raise
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._complete = True
            await self.release()
        return message

    async def release(self) -> None:
        """Free the slot. Twice is harmless."""
        await self._held.aclose()

    async def _next_message(self) -> Message:
        limits = self._limits
        if self._deadline is None:
            await self._take_slot()
            self._deadline = time.monotonic() + limits.body_s
        left_s = max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(min(left_s, limits.body_idle_s)):
                return await self._receive()
        except TimeoutError:
            raise _too_late(limits, left_s <= limits.body_idle_s) from None

    async def _take_slot(self) -> None:
        if self._slot is None:
            return
        try:
            await self._held.enter_async_context(self._slot)
        except NoSlotError:
            message = (
                "Other large JSON bodies are being received, and none was complete in time. At most "
                f"{self._limits.json_bodies} are received at once (limits.json_bodies), of one tenant "
                f"{self._limits.tenant_json_bodies} (limits.tenant_json_bodies). Ask again."
            )
            raise ApiError(503, message, "bodies_busy", retry_after_s=5, headers={"connection": "close"}) from None

    def _count(self, piece: bytes) -> None:
        self._bytes += len(piece)
        self._values += 0 if self._holds_documents else count_values(piece)
        _check_size(self._bytes, self._limits, self._holds_documents)
        _check_values(self._values, self._limits)


def _tenant_of(scope: Scope) -> str:
    principal: Principal | None = scope["state"]["principal"]
    return "" if principal is None else principal.tenant


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
