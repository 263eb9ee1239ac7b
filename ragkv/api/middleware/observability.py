"""Request ids, the access log, request metrics, error responses, and the headers that every response has."""

import contextlib
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Mount
from starlette.types import Message, Receive, Scope, Send

from ragkv.runtime import tracing

from ..errors import CLIENT_GONE, as_api_error
from ..logs import RequestStats, logger
from .auth import STATIC_PREFIX
from .base import HTTPMiddleware

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
        scope.setdefault("state", {}).update(request_id=request_id, stats=RequestStats(), principal=None)
        own = {"x-request-id": request_id, "x-replica": self._server.replica}
        response = _Response(scope, send, {**SECURITY_HEADERS, **own})
        self._server.metrics.change_running(+1)
        probed = scope["path"] in PROBED_ROUTES
        span = contextlib.nullcontext() if probed else tracing.server_span(Headers(scope=scope))
        with structlog.contextvars.bound_contextvars(request_id=request_id), span as trace:
            try:
                await self._answer(scope, receive, response)
            finally:
                self._server.metrics.change_running(-1)
                self._record(scope, response, time.perf_counter() - began, trace)

    async def _answer(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        try:
            await self._app(scope, receive, response.send)
        except Exception as error:
            if response.status is not None:
                raise  # too late for an error response: uvicorn logs the error and cuts the connection
            await as_api_error(error).response(scope, receive, response.send)

    def _record(self, scope: Scope, response: "_Response", seconds: float, trace: Any) -> None:
        """Write the access line and the metrics, and name the span `trace`, if there is one, by the route."""
        state = scope["state"]
        method = scope["method"] if scope["method"] in METHODS else "other"
        route, status = _route_template(scope), response.status or CLIENT_GONE
        self._server.metrics.record_request(route, method, status, seconds)
        fields: dict[str, Any] = {"method": method, "route": route, "status": status, "duration_s": round(seconds, 4)}
        if state["principal"] is not None and state["principal"].key_id:
            fields["key"] = state["principal"].key_id
        if not response.complete:
            fields["cut"] = True  # the client left, or the server closed the connection
        write = logger().debug if route in PROBED_ROUTES and status < 400 else logger().info
        write("request", **fields, **state["stats"].fields())
        if trace is not None:
            trace.update_name(f"{method} {route}")
            values = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
            trace.set_attributes({**values, "ragkv.request_id": state["request_id"]})


class _Response:
    """One response on its way out: adds `headers`, and remembers the status and whether the last byte was sent."""

    def __init__(self, scope: Scope, send: Send, headers: Mapping[str, str]) -> None:
        self._scope, self._send, self._headers = scope, send, headers
        self.status: int | None = None
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self._headers)
            if self.status == 405 and (methods := _allowed_methods(self._scope)):
                headers["allow"] = ", ".join(methods)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True


def _allowed_methods(scope: Scope) -> list[str]:
    """All methods of the request's path. The router itself names only those of the first route with that path."""
    if "app" not in scope:
        return []
    probe = {"type": "http", "path": scope["path"], "root_path": "", "headers": []}
    routes = [route for route in scope["app"].routes if not isinstance(route, Mount)]
    return [
        method
        for method in METHODS
        if any(route.matches({**probe, "method": method})[0] is Match.FULL for route in routes)
    ]


def _route_template(scope: Scope) -> str:
    """The path template of the request's route; "none" if no route was reached. A metric label, so it is bounded."""
    if scope["path"].startswith(STATIC_PREFIX):
        return STATIC_PREFIX
    return getattr(scope.get("route"), "path", None) or "none"
