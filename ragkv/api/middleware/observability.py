"""Request ids, the access log, request metrics, error responses, and the headers that every response has."""

import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ..errors import CLIENT_GONE, as_api_error
from ..logs import logger
from .access import STATIC_PREFIX, HTTPMiddleware, is_public

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
PROBED_ROUTES = ("/livez", "/readyz", "/metrics")  # They are requested every few seconds, so they fill no log.
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ObservabilityMiddleware(HTTPMiddleware):
    """Gives every request an id, times, logs and counts it, and answers errors that the inner layers raise."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {}).update(request_id=request_id, stats=Counter(), principal=None)
        own = {"x-request-id": request_id, "x-replica": self._service.replica}
        caching = {} if is_public(scope["path"]) else {"cache-control": "no-store"}
        response = _Response(send, {**SECURITY_HEADERS, **caching, **own})
        running = self._service.metrics.running.track_inprogress()
        with running, structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._answer(scope, receive, response)
            finally:
                self._record(scope, response, time.perf_counter() - began)

    async def _answer(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        try:
            await self._app(scope, receive, response.send)
        except Exception as error:
            if response.status is not None:
                raise  # too late for an error response: uvicorn logs the error and cuts the connection
            await as_api_error(error).response(scope["path"])(scope, receive, response.send)

    def _record(self, scope: Scope, response: "_Response", seconds: float) -> None:
        """Write the access line and the metrics."""
        state = scope["state"]
        method = scope["method"] if scope["method"] in METHODS else "other"
        route, status = _route_template(scope), response.status or CLIENT_GONE
        self._service.metrics.requests.labels(route, method, str(status)).observe(seconds)
        fields: dict[str, Any] = {"method": method, "route": route, "status": status, "duration_s": round(seconds, 4)}
        if state["principal"] is not None and state["principal"].key_id:
            fields["key"] = state["principal"].key_id
        if not response.complete:
            fields["cut"] = True  # the client left, or the server closed the connection
        write = logger().debug if route in PROBED_ROUTES and status < 400 else logger().info
        write("request", **fields, **state["stats"])


class _Response:
    """One response on its way out: adds `headers`, and remembers the status and whether the last byte was sent."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send, self._headers = send, headers
        self.status: int | None = None
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(self._headers)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True


def _route_template(scope: Scope) -> str:
    """The path template of the request's route; "none" if no route was reached. A metric label, so it is bounded."""
    if scope["path"].startswith(STATIC_PREFIX):
        return STATIC_PREFIX
    return getattr(scope.get("route"), "path", None) or "none"
