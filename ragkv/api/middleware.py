"""What happens to every request before and around its route: pure ASGI, so that streams flow as they are made.

From the outside in: a request is named, timed, logged and counted, and whatever fails inside is answered; it must be
addressed to this server, and not sent by a web page from elsewhere; the server must be taking requests; it must come
with a key where keys are asked for, and at the key's rate; its body must be of a type taken, small enough, and arrive.
"""

import asyncio
import hmac
import ipaddress
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import health
from .errors import ApiError, as_api_error
from .keys import ANONYMOUS, KeyRing, Principal
from .limits import Limiter
from .logs import Observed, logger
from .metrics import CONTENT_TYPE, Metrics, Tenant
from .server import Readiness
from .settings import ServeConfig, is_loopback

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OPEN_PATHS = (
    "/",
    "/livez",
    "/readyz",
    "/version",
    "/metrics",
    "/openapi.json",
    "/favicon.ico",
)  # no key, not held back
OPEN_PREFIX = "/static/"
PATH_BYTES = 4096
PASSED_ON = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")  # a proxy's: the client is not here
RATE_HEADERS = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]
SECURITY = {
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
_UPLOADS = re.compile(r"/v1/collections/[^/]+/documents/?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Tenancy(Protocol):
    """What is asked of the tenants."""

    def stats(self) -> Sequence[Tenant]:
        """What the open ones hold; opens none, and is quick."""
        ...

    def directories(self) -> Sequence[Path]:
        """Where the open ones keep their KV."""
        ...


@dataclass(frozen=True, slots=True)
class ServerState:
    """What an app's requests go by."""

    config: ServeConfig
    keys: KeyRing
    limiter: Limiter
    metrics: Metrics
    readiness: Readiness

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs a key."""
        return self.config.auth.required and (self.keys.exists or not self.config.on_loopback)


def install(app: FastAPI, config: ServeConfig, tenancy: Tenancy) -> ServerState:
    """Give `app`, which has all its routes, its conduct, health and metrics; it is `app.state.server` from then on."""
    conduct = ServerState(config, KeyRing(config.keys_path), Limiter(), Metrics(tenancy.stats), Readiness())
    app.state.server = conduct
    app.openapi = _told_of_keys(app)  # type: ignore[method-assign]  # FastAPI's own way of changing what it tells
    app.include_router(health.router(conduct.readiness, health.Probe(tenancy.directories)))
    app.add_api_route("/metrics", _metrics, include_in_schema=False)
    app.add_middleware(Bodies, conduct=conduct)
    app.add_middleware(Doorkeeper, conduct=conduct)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id", "x-session-id"],
            expose_headers=["x-request-id", "retry-after", *RATE_HEADERS],
        )
    app.add_middleware(Addressed, conduct=conduct)
    app.add_middleware(Observing, conduct=conduct)  # added last: the outermost
    return conduct


class Observing:
    """Names, times, logs and counts every request; answers what fails; the headers every response has."""

    def __init__(self, app: ASGIApp, conduct: ServerState) -> None:
        self._app, self._conduct = app, conduct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = _request_id(Headers(scope=scope).get("x-request-id"))
        state["observed"], state["principal"] = Observed(), None
        reply = _Reply(_with_methods(scope, send), {**SECURITY, "x-request-id": request_id})
        self._conduct.metrics.running(+1)
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._answered(scope, receive, reply)
            finally:
                self._conduct.metrics.running(-1)
                self._account(scope, reply, time.perf_counter() - began)

    async def _answered(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        try:
            await self._app(scope, receive, reply.send)
        except Exception as error:
            if reply.status is not None:
                raise  # too late for another answer: uvicorn logs it, and cuts the connection so that it shows
            await as_api_error(error).response(scope, receive, reply.send)

    def _account(self, scope: Scope, reply: "_Reply", seconds: float) -> None:
        state = scope["state"]
        method = scope["method"] if scope["method"] in METHODS else "other"
        route, status = _template(scope), reply.status or 499  # nothing was sent: the client left before
        self._conduct.metrics.request(route, method, status, seconds)
        principal: Principal | None = state["principal"]
        fields = {"key": principal.key_id} if principal is not None and principal.key_id else {}
        if not reply.complete:
            fields["cut"] = True  # type: ignore[assignment]  # the client left, or was cut off
        quiet = route in ("/livez", "/readyz", "/metrics") and status < 400  # asked every few seconds
        write = logger().debug if quiet else logger().info
        duration = round(seconds, 4)
        write(
            "request",
            method=method,
            route=route,
            status=status,
            duration_s=duration,
            **fields,
            **state["observed"].fields(),
        )


class _Reply:
    """One response on its way out."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send, self._headers = send, headers
        self.status: int | None = None
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in self._headers.items():
                headers[name] = value
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True


class Addressed:
    """A request must be addressed to this server by one of its names, and must not be a foreign page's.

    Without keys a server on loopback trusts whoever is on this machine, and a browser there runs everybody's pages. A
    page whose name is made to resolve to 127.0.0.1 sends that name as the host; a page of another origin says so.
    """

    def __init__(self, app: ASGIApp, conduct: ServerState) -> None:
        self._app, self._conduct = app, conduct
        self._hosts = {host.lower() for host in conduct.config.hosts}
        self._origins = {_origin(origin) for origin in conduct.config.cors_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if len(scope.get("raw_path") or b"") > PATH_BYTES or _CONTROL.search(scope["path"]):
                raise ApiError(400, f"The path is longer than {PATH_BYTES} bytes, or has control characters.")
            host = headers.get("host", "")
            if not self._is_ours(_name(host)):
                raise ApiError(
                    403,
                    f"This server is not addressed as {host[:100]!r} without a key. Add the name to the setting "
                    "`hosts`, or make keys with `ragkv keys add`.",
                    code="host_not_allowed",
                )
            origin = headers.get("origin")
            if origin is not None and scope["method"] not in SAFE_METHODS:
                self._check_origin(origin, host)
        await self._app(scope, receive, send)

    def _is_ours(self, name: str) -> bool:
        config = self._conduct.config
        if name in self._hosts or is_loopback(name):
            return True
        if self._conduct.asks_for_keys:
            return not self._hosts
        return not config.on_loopback and _is_address(name)  # a name can be made to resolve to us; an address is itself

    def _check_origin(self, origin: str, host: str) -> None:
        asked = _origin(origin)
        if asked is None or (asked not in self._origins and asked[1:] != _place(host, asked[0])):
            raise ApiError(
                403,
                f"A page of {origin[:100]!r} may not change anything here. Add its origin to `cors_origins` if it may.",
                code="cross_origin",
            )


class Doorkeeper:
    """Requests are taken while the server is ready, with a key where keys are asked for, at the key's rate."""

    def __init__(self, app: ASGIApp, conduct: ServerState) -> None:
        self._app, self._conduct = app, conduct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        principal = scope["state"]["principal"] = self._principal(Headers(scope=scope))
        self._conduct.readiness.enter()
        try:
            rates = self._conduct.limiter.take_request(principal)
            await self._app(scope, receive, _Reply(send, {"cache-control": "no-store", **rates}).send)
        finally:
            self._conduct.readiness.leave()

    def _principal(self, headers: Headers) -> Principal:
        if not self._conduct.asks_for_keys:
            return ANONYMOUS
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthenticated("This server asks for a key: send `Authorization: Bearer rk-...`.")
        principal = self._conduct.keys.principal(key.strip())
        if principal is None:
            raise _unauthenticated("This key is unknown, revoked or past its time.")
        return principal


class Bodies:
    """A request's body is of a type that is taken, within the limit, and arrives in time; an answer is read in time.

    Bytes are counted as they come, whatever the length that was announced. What is too large is not read to its end.
    """

    def __init__(self, app: ASGIApp, conduct: ServerState) -> None:
        self._app, self._limits = app, conduct.config.limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > self._limits.body_bytes:
            raise self._too_large()
        if announced not in ("", "0") or "transfer-encoding" in headers:
            _check_type(headers.get("content-type", ""), scope["path"])
        refused: ApiError | None = None
        received, ends = 0, time.monotonic() + self._limits.body_s
        whole = started = False

        async def receive_counted() -> Message:
            nonlocal refused, received, whole
            if whole:
                return await receive()  # a disconnect, whenever it comes
            try:
                async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                seconds = f"{self._limits.body_s:g} s"
                refused = ApiError(408, f"The body did not arrive within {seconds}.", "timeout_error", "body_timeout")
                raise refused from None
            received += len(message.get("body", b""))
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            if received > self._limits.body_bytes:
                refused = self._too_large()
                raise refused
            return message

        async def send_timely(message: Message) -> None:
            nonlocal started
            if refused is not None and not started:
                return  # what the route made of a body that broke off; we answer
            started = True
            async with asyncio.timeout(self._limits.stall_s):
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
            f"The body is larger than {self._limits.body_bytes} bytes. Send less at a time.",
            code="body_too_large",
            headers={"connection": "close"},  # the rest of it is not read
        )


async def _metrics(request: Request) -> Response:
    """The metrics: with the token if one is set, else for this machine alone."""
    conduct: ServerState = request.app.state.server
    token = conduct.config.auth.metrics_token
    if token is not None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise _unauthenticated("The metrics ask for the token of the setting auth.metrics_token.")
    elif not conduct.config.on_loopback or any(name in request.headers for name in PASSED_ON):
        raise ApiError(403, "The metrics are for this machine alone. Set auth.metrics_token to read them from others.")
    conduct.metrics.ready(conduct.readiness.unavailable_reason is None)
    return Response(await asyncio.to_thread(conduct.metrics.render), media_type=CONTENT_TYPE)


def _with_methods(scope: Scope, send: Send) -> Send:
    """`send`, whose 405 tells all methods of the path: the router tells those of the first route that has it."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 405 and "app" in scope:
            asked = {"type": "http", "path": scope["path"], "root_path": "", "headers": []}
            routes = [route for route in scope["app"].routes if not isinstance(route, Mount)]
            methods = [
                method
                for method in sorted(METHODS)
                if any(route.matches({**asked, "method": method})[0] is Match.FULL for route in routes)
            ]
            if methods:
                MutableHeaders(scope=message)["allow"] = ", ".join(methods)
        await send(message)

    return sending


def _told_of_keys(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """What makes `app`'s OpenAPI, which says that what stands under /v1 takes a key, where keys are asked for."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schema = made()
        if not app.state.server.asks_for_keys:
            return schema
        schema.setdefault("components", {})["securitySchemes"] = {
            "key": {
                "type": "http",
                "scheme": "bearer",
                "description": "A key of `ragkv keys add`, where there are any.",
            }
        }
        for path, operations in schema["paths"].items():
            if not _is_open(path):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
        return schema

    return openapi


def _check_type(content_type: str, path: str) -> None:
    """Raise `ApiError` 415 unless JSON, or a form where files are taken. A page elsewhere cannot send JSON unasked."""
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charsets = [p.partition("=")[2].strip('"') for p in parameters if p.startswith("charset=")]
    if kind == "application/json" and all(charset in ("utf-8", "utf8") for charset in charsets):
        return
    forms = _UPLOADS.fullmatch(path) is not None
    if forms and kind == "multipart/form-data":
        return
    taken = "application/json (UTF-8) or multipart/form-data" if forms else "application/json (UTF-8)"
    raise ApiError(415, f"The content type {content_type[:100]!r} is not taken here; send {taken}.")


def _unauthenticated(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _request_id(given: str | None) -> str:
    return given if given is not None and _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _template(scope: Scope) -> str:
    """The route's template: as many as there are routes. "none": it did not get to one."""
    if scope["path"].startswith(OPEN_PREFIX):
        return OPEN_PREFIX
    return getattr(scope.get("route"), "path", None) or "none"


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _place(host: str, scheme: str) -> tuple[str, int] | None:
    """Name and port of a Host header under a scheme."""
    found = _origin(f"{scheme}://{host}")
    return None if found is None else found[1:]


def _origin(text: str) -> tuple[str, str, int] | None:
    """Scheme, name and port of an origin; `None` if it is none, as "null"."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    default = {"http": 80, "https": 443}.get(parts.scheme)
    if default is None or not parts.hostname:
        return None
    return parts.scheme, parts.hostname.lower(), port or default


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


__all__ = ["Addressed", "Bodies", "ServerState", "Doorkeeper", "Observing", "Tenancy", "install"]
