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
        self._origins = {_origin(origin) for origin in service.config.cors_origins}

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
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in SAFE_METHODS:
            self._check_origin(origin, host)
        await self._app(scope, receive, send)

    def _is_known_host(self, name: str) -> bool:
        if name in self._hosts or is_loopback(name):
            return True
        if self._service.requires_key:
            return not self._hosts
        # A name can be made to resolve to this server; an address cannot.
        return not self._service.config.is_private and _is_address(name)

    def _check_origin(self, text: str, host: str) -> None:
        """Raise `ApiError` 403 unless the origin is this server's own, whatever its scheme, or is in `cors_origins`."""
        origin = _origin(text)
        own = None if origin is None else _origin(f"{origin[0]}://{host}")
        if origin is None or (origin not in self._origins and origin != own):
            raise ApiError(
                403,
                f"A page of {text[:100]!r} may not change anything here. If it should, add it to `cors_origins`.",
                "cross_origin",
            )


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _origin(text: str) -> tuple[str, str, int] | None:
    """Scheme, host name and port of an origin; `None` for text such as "null" that is not an origin."""
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
