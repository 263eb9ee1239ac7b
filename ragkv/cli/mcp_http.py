"""`ragkv mcp --http`: MCP's streamable HTTP, behind a key and the REST service's checks of host and origin."""

import hmac
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragkv.api import ServeConfig
from ragkv.api.errors import ApiError
from ragkv.api.middleware.origin import OriginMiddleware

from .output import errors

if TYPE_CHECKING:
    from ragkv.api.server_state import ServerState

PATH = "/mcp"
CONNECTIONS = 64  # at once, and requests waiting; more get 503


@dataclass(frozen=True, slots=True)
class _Front:
    """What the check of host and origin knows of a server."""

    config: ServeConfig
    requires_key: bool


class KeyGuard:
    """Asks for the key, and answers the errors of what lies inside in the service's shape."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        """Without a key (""), everyone who passes the other checks is served."""
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(Headers(scope=scope).get("authorization", ""))
            await self._app(scope, receive, send)
        except ApiError as error:
            await error.response(scope, receive, send)

    def _check(self, given: str) -> None:
        scheme, _, key = given.partition(" ")
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._key.encode())
        if self._key and not is_right:
            message = "This server needs its key: send `Authorization: Bearer KEY`."
            raise ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})


def http_app(server: MCPServer[Any], host: str, key: str) -> ASGIApp:
    """The server as an ASGI application for an address to listen on; "": no key."""
    # Host and origin are checked by our own middleware, as the REST service checks them.
    unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    inner = server.streamable_http_app(streamable_http_path=PATH, host=host, transport_security=unchecked)
    front = _Front(ServeConfig(host=host), bool(key))
    return KeyGuard(OriginMiddleware(inner, cast("ServerState", front)), key)


def serve_http(server: MCPServer[Any], host: str, port: int, key: str) -> None:
    """Serve until a signal ends the process."""
    settings = uvicorn.Config(
        http_app(server, host, key),
        host=host,
        port=port,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=10,
    )
    listener = settings.bind_socket()
    listener.listen()
    _announce(listener)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    uvicorn.Server(settings).run(sockets=[listener])


def _announce(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    errors.print(f"ragkv mcp listens at http://{f'[{host}]' if ':' in host else host}:{port}{PATH}; Ctrl-C ends it.")
