"""Authentication, admission and rates: who sends the request, and whether it is accepted now."""

from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from ..errors import invalid_key
from ..keys import ANONYMOUS, Principal
from .base import HTTPMiddleware

# These paths need no key and are served while the server is not ready.
PUBLIC_PATHS = ("/", "/livez", "/readyz", "/metrics", "/openapi.json", "/favicon.ico")
STATIC_PREFIX = "/static/"
# A request with one of these headers came through a proxy: its client may be on another machine.
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def is_public(path: str) -> bool:
    """Whether `path` is served without a key."""
    return path in PUBLIC_PATHS or path.startswith(STATIC_PREFIX)


def came_through_proxy(headers: Headers) -> bool:
    """Whether a proxy stands between the client and this server."""
    return any(name in headers for name in PROXY_HEADERS)


def _is_known(scope: Scope) -> bool:
    """Whether a route has this path: an unknown one is unknown at any time."""
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


class AuthMiddleware(HTTPMiddleware):
    """Accepts a request while the server is ready, with a key where keys are required, at the key's rate."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_public(scope["path"]):
            await self._app(scope, receive, send)
            return
        principal = scope["state"]["principal"] = self._principal(Headers(scope=scope))
        if self._service.unavailable_reason is not None and _is_known(scope):
            self._service.check_ready()
        self._service.limiter.take_request(principal)
        await self._app(scope, receive, send)

    def _principal(self, headers: Headers) -> Principal:
        if not self._service.requires_key:
            if self._service.config.auth.required and came_through_proxy(headers):
                raise invalid_key(
                    "This server has no keys and serves this machine alone, and the request came through a proxy. Make "
                    "a key with `ragkv keys add NAME`."
                )
            return ANONYMOUS
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise invalid_key("This server requires a key: send `Authorization: Bearer rk-...`.")
        principal = self._service.keys.principal(key.strip())
        if principal is None:
            raise invalid_key("This key is unknown, revoked or expired.")
        return principal
