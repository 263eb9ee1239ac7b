"""Request ids, access, the access log, request metrics, error responses, and the headers of every
response.
"""

import re
import time
import uuid
from collections import Counter
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import CLIENT_GONE
from ..failures import response_to
from ..logs import log
from ..service import Service
from .access import STATIC_PREFIX, Access, bounded, is_public

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
# They are requested every few seconds, so they fill no log.
PROBED_ROUTES = ("/livez", "/readyz", "/metrics")
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RequestMiddleware:
    """Gives every request an id, times, logs and counts it, refuses it where it must, and answers
    its errors.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._access = Access(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {}).update(request_id=request_id, stats=Counter(), principal=None)
        own = {"x-request-id": request_id, "x-replica": self._service.replica}
        caching = {} if is_public(scope["path"]) else {"cache-control": "no-store"}
        status = 0
        is_complete = False

        async def respond(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update({**SECURITY_HEADERS, **caching, **own})
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )

        running = self._service.metrics.running.track_inprogress()
        with running, structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                self._access.check(scope)
                await self._app(
                    scope, bounded(scope, receive, self._service.config.limits), respond
                )
            except Exception as error:
                if status:
                    # too late for an error response: uvicorn logs the error and cuts the connection
                    raise
                await response_to(error, scope["path"])(scope, receive, respond)
            finally:
                self._record(scope, status or CLIENT_GONE, is_complete, time.perf_counter() - began)

    def _record(self, scope: Scope, status: int, is_complete: bool, seconds: float) -> None:
        """Write the access line and the metrics."""
        state = scope["state"]
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = _route_template(scope)
        self._service.metrics.requests.labels(route, method, str(status)).observe(seconds)
        fields: dict[str, Any] = {
            "method": method,
            "route": route,
            "status": status,
            "duration_s": round(seconds, 4),
        }
        if state["principal"] is not None and state["principal"].key_id:
            fields["key"] = state["principal"].key_id
        if not is_complete:
            fields["cut"] = True  # the client left, or the server closed the connection
        write = log.debug if route in PROBED_ROUTES and status < 400 else log.info
        write("request", **fields, **state["stats"])


def _route_template(scope: Scope) -> str:
    """The path template of the request's route; "none" if no route was reached. A metric label, so
    it is bounded.
    """
    if scope["path"].startswith(STATIC_PREFIX):
        return STATIC_PREFIX
    return getattr(scope.get("route"), "path", None) or "none"
