"""The host that a request is addressed to, and the web page that sends it."""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragkv.runtime import is_loopback

from ..errors import ApiError
from ..service import Service
from .base import HTTPMiddleware

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class OriginMiddleware(HTTPMiddleware):
    """Refuses a request that is addressed to an unknown host name, or that a foreign web page sends.

    A server on loopback without keys trusts everyone on this machine, but a browser on this machine runs foreign pages.
    An attacker can make a name of their own resolve to 127.0.0.1 (DNS rebinding): the browser then sends that name as
    the host. A page of another origin sends its origin.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(app, service)
        self._hosts = {host.lower() for host in service.config.hosts}
        self._origins = {origin.lower().rstrip("/") for origin in service.config.cors_origins}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_known_host(_host_name(host)):
            raise ApiError(
                403,
                f"This server does not answer as {host[:100]!r} without a key. Add the name to the setting "
                "`hosts`, or make keys with `ragkv keys add`.",
                "host_not_allowed",
            )
        origin = headers.get("origin", f"://{host}").lower()
        # A browser leaves the same ports out of both; "null" is the origin of no server.
        if scope["method"] not in SAFE_METHODS and origin.partition("://")[2] != host.lower():
            self._check_allowed(origin)
        await self._app(scope, receive, send)

    def _is_known_host(self, name: str) -> bool:
        if name in self._hosts or is_loopback(name):
            return True
        if self._service.requires_key:
            return not self._hosts
        # A name can be made to resolve to this server; an address cannot.
        return not self._service.config.is_private and _is_address(name)

    def _check_allowed(self, origin: str) -> None:
        """Raise `ApiError` 403 unless the origin, which is not this server's own, is in `cors_origins`."""
        if origin not in self._origins:
            message = (
                f"A page of {origin[:100]!r} may not change anything here. If it should, add it to `cors_origins`."
            )
            raise ApiError(403, message, "cross_origin")


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
