"""Surrounds every route, in pure ASGI, so that streams are not delayed.

`RequestMiddleware` gives each request an id, times, logs and counts it, and answers every error.
`Access` refuses requests to an unknown host, of a foreign web page, while the server is not ready,
without a valid key, or above the key's rate. `bounded` refuses a body of the wrong type or size.
"""

import ipaddress
import re
import time
import uuid
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import structlog
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.runtime import is_loopback

from .errors import CLIENT_GONE, ApiError, invalid_key
from .failures import response_to
from .keys import ANONYMOUS, Principal
from .logs import log
from .service import Service
from .settings import LimitsConfig

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
# These paths need no key and are served while the server is not ready.
PUBLIC_PATHS = ("/", "/livez", "/readyz", "/metrics", "/openapi.json", "/favicon.ico")
STATIC_PREFIX = "/static/"
ANSWER_PATHS = ("/v1/ask", "/v1/chat/completions", "/api/chat", "/api/generate")
# A request with one of these headers came through a proxy: its client may be on another machine.
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# A key as it is sent. nginx counts by the same expression (deploy/nginx.conf).
AUTHORIZATION = re.compile(r"bearer +(rk-[\w-]{1,200})", re.ASCII | re.IGNORECASE)
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # Most requests have one of these names as their host.
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Bodies of these paths are JSON or forms, and are parsed in processes of their own.
_UPLOAD_PATHS = re.compile(r"/v1/collections/[^/]+/documents/?")


def install(app: FastAPI, service: Service) -> None:
    """Add the middleware to `app`, which has all its routes."""
    app.add_middleware(RequestMiddleware, service=service)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )


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


def is_public(path: str) -> bool:
    """Whether `path` is served without a key."""
    return path in PUBLIC_PATHS or path.startswith(STATIC_PREFIX)


def came_through_proxy(headers: Headers) -> bool:
    """Whether a proxy stands between the client and this server."""
    return any(name in headers for name in PROXY_HEADERS)


class Access:
    """Accepts a request to a known host, of no foreign web page, with a key where keys are
    required, at its rate.

    A server on loopback without keys trusts everyone on this machine, but a browser on this machine
    runs foreign pages. An attacker can make a name of their own resolve to 127.0.0.1 (DNS
    rebinding): the browser then sends that name as the host. A page of another origin sends its
    origin.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._hosts = {host.lower() for host in service.config.hosts}
        self._own = {*LOOPBACK, *self._hosts}
        self._is_private = service.config.is_private
        self._origins = {origin.lower().rstrip("/") for origin in service.config.cors_origins}

    def check(self, scope: Scope) -> None:
        """Note who sends the request of `scope`; raises `ApiError` if it is refused."""
        _check_path(scope)
        headers = Headers(scope=scope)
        self._check_host(host := headers.get("host", ""))
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(headers.get("origin", f"://{host}").lower(), host.lower())
        if not is_public(scope["path"]):
            principal = scope["state"]["principal"] = self._principal(headers)
            # but an unknown path is unknown at any time
            is_away = self._service.unavailable_reason is not None
            if is_away and any(
                route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes
            ):
                message = f"{self._service.unavailable_reason} Ask again."
                raise ApiError(503, message, "not_ready", retry_after_s=2)
            self._service.limiter.take_request(principal)
            if scope["path"] in ANSWER_PATHS:  # refused before the body is parsed
                self._service.answer_pool.check_space(principal.tenant)

    def _check_host(self, host: str) -> None:
        """Raise `ApiError` 403 for a request that is addressed to an unknown host name."""
        name = _host_name(host)
        if name in self._own or is_loopback(name):
            return
        # A name can be made to resolve to this server; an address cannot.
        is_address = not self._is_private and _is_address(name)
        if not (not self._hosts if self._requires_key else is_address):
            message = (
                f"This server does not answer as {host[:100]!r} without a key. Add the name to "
                "the setting `hosts`, or "
                "make keys with `ragkv keys add`."
            )
            raise ApiError(403, message, "host_not_allowed")

    def _check_origin(self, origin: str, host: str) -> None:
        """Raise `ApiError` 403 unless the origin is this server's own, or in `cors_origins`.

        A browser leaves the same ports out of both; "null" is the origin of no server.
        """
        if origin.partition("://")[2] != host and origin not in self._origins:
            message = (
                f"A page of {origin[:100]!r} may not change anything here; `cors_origins` "
                "would allow it."
            )
            raise ApiError(403, message, "cross_origin")

    @property
    def _requires_key(self) -> bool:
        """Whether a request needs an API key."""
        keys = self._service.keys
        return self._service.config.auth.required and (keys.exists or not self._is_private)

    def _principal(self, headers: Headers) -> Principal:
        if not self._requires_key:
            if self._service.config.auth.required and came_through_proxy(headers):
                raise invalid_key(
                    "This server has no keys and serves this machine alone, and the request came "
                    "through a proxy. Make "
                    "a key with `ragkv keys add NAME`."
                )
            return ANONYMOUS
        sent = headers.getlist("authorization")
        found = AUTHORIZATION.fullmatch(sent[0]) if len(sent) == 1 else None
        if found is None:
            raise invalid_key("This server requires a key: send `Authorization: Bearer rk-...`.")
        principal = self._service.keys.principal(found[1])
        if principal is None:
            raise invalid_key("This key is unknown, revoked or expired.")
        return principal


def _check_path(scope: Scope) -> None:
    """Raise `ApiError` 400 for a path that names something else than it says.

    Routes leave out a line break at the end, and bytes that are no UTF-8 all become one character.
    """
    path: bytes = unquote_to_bytes(scope.get("raw_path") or scope["path"])
    try:
        is_plain = CONTROL.search(path.decode()) is None
    except UnicodeDecodeError:
        is_plain = False
    if not is_plain:
        message = "The path is no text of UTF-8 without control characters. Write it as it is."
        raise ApiError(400, message)


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    with suppress(ValueError):
        return (urlsplit(f"//{host}").hostname or "").lower()
    return ""


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def count_values(body: bytes) -> int:
    """About how many values a JSON text holds, commas in strings included: a fast bound of the work
    of parsing it.
    """
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def bounded(scope: Scope, receive: Receive, limits: LimitsConfig) -> Receive:
    """`receive` for a body within the limits; both raise `ApiError` for one above them, or of a
    wrong type.

    nginx has the whole body before it arrives here, so no time is bounded. Bytes are counted all
    the same, whatever content length was announced, because on loopback nginx may not be there.
    """
    headers = MutableHeaders(scope=scope)
    holds_documents = _UPLOAD_PATHS.fullmatch(scope["path"]) is not None
    is_small = not holds_documents and limits.json_bytes < limits.body_bytes
    setting = "json_bytes" if is_small else "body_bytes"
    size = 0
    values = 0
    most = getattr(limits, setting)

    def check(size: int) -> None:
        if size > most:
            raise _too_large(f"is larger than {most} bytes (limits.{setting})")
        if values > limits.json_values:
            raise _too_large(
                f"has more than {limits.json_values} commas and opening brackets "
                "(limits.json_values)"
            )

    async def receive_counted() -> Message:
        nonlocal size, values
        message = await receive()
        piece = message.get("body", b"")
        size += len(piece)
        values += 0 if holds_documents else count_values(piece)
        check(size)
        return message

    announced = headers.get("content-length", "0")
    check(int(announced[:20]) if announced.isdecimal() else 0)
    if announced != "0" or "transfer-encoding" in headers:
        if _is_curl(scope["path"], headers):
            headers["content-type"] = "application/json"
        _check_type(headers.get("content-type", ""), holds_documents)
    return receive_counted


def _too_large(problem: str) -> ApiError:
    message = f"The body {problem}. Send less at a time."
    # the rest of it is not read
    return ApiError(413, message, "body_too_large", headers={"connection": "close"})


def _is_curl(path: str, headers: Headers) -> bool:
    """Whether this is `curl -d` at Ollama's API, whose documentation leaves the content type out.

    A web page can send a form, too; but a browser says where it comes from.
    """
    of_browser = "origin" in headers or "sec-fetch-site" in headers
    is_form = headers.get("content-type", "") in ("", "application/x-www-form-urlencoded")
    return path.startswith("/api/") and is_form and not of_browser


def _check_type(content_type: str, takes_forms: bool) -> None:
    """Raise `ApiError` 415 unless the body is JSON, or a form where files are uploaded.

    A foreign web page cannot send JSON without the server's consent (CORS), but it can send forms.
    """
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charsets = [p.partition("=")[2].strip('"') for p in parameters if p.startswith("charset=")]
    is_json = kind == "application/json" and all(
        charset in ("utf-8", "utf8") for charset in charsets
    )
    if not is_json and not (takes_forms and kind == "multipart/form-data"):
        accepted = "application/json (UTF-8)" + (" or multipart/form-data" if takes_forms else "")
        raise ApiError(
            415, f"The content type {content_type[:100]!r} is not accepted here; send {accepted}."
        )
