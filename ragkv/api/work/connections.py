"""Connections before their request is complete: how many there may be, and how much time and memory they may take.

All of this happens before a key is checked, so it costs little. h11 parses the requests: unlike httptools it bounds the
bytes of a request's head. Every connection has one timer, which data that trickles in does not restart.
"""

import asyncio
import enum
import ipaddress
import json
import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from ..errors import ApiError
from ..logs import logger
from ..metrics import Metrics
from ..settings import ServeConfig
from .descriptors import connection_limit

BODY_SLACK_S = 2.0  # the application answers a late body itself, unless its route does not read the body
LOG_S = 60.0  # seconds between two log lines about refused connections

# uvicorn warns about every malformed request, so a client could fill the log. The metrics count them instead.
_ERRORS = logging.getLogger("uvicorn.error.requests")
_ERRORS.setLevel(logging.ERROR)


class Phase(enum.Enum):
    """What a connection waits for."""

    HEAD = "head"  # the rest of the first request's head, or of another one of which the first byte arrived
    BODY = "body"  # the rest of a request's body
    IDLE = "idle"  # the next request; the last one is answered
    REST = "rest"  # the rest of a body that was answered before it was complete; it is not read
    BUSY = "busy"  # its answer: only the server makes it wait


class ConnectionTable:
    """All open connections of a server. Only the event loop's thread uses it.

    When there are too many, a new connection takes the place of the one whose client let the server wait longest. A
    client that sends its request at once is therefore served whatever others do. A connection that waits for its answer
    is never closed for another one.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._limit = connection_limit(config.connections.limit)
        self._client_limit = config.connections.per_client
        self._is_proxy = _proxy_test(config.proxies)
        self._metrics = metrics
        self._clients: dict[Connection, str] = {}  # every connection and its client; "": a proxy, for any client
        self._counts: Counter[str] = Counter()  # connections by client
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # whose client has to send; longest ago first
        self._unlogged: Counter[str] = Counter()
        self._logged_at = float("-inf")

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, connection: "Connection", address: str) -> bool:
        """Add a new connection, if necessary in another one's place; `False` if there is no place for it."""
        client = "" if self._is_proxy(address) else _client_of(address)
        if client and self._counts[client] >= self._client_limit and not self._make_space(client):
            self.count("client_limit")
            return False
        if len(self._clients) >= self._limit and not self._make_space(None):
            self.count("limit")
            return False
        self._clients[connection] = client
        self._counts[client] += 1
        self._waiting[connection] = None
        self._metrics.set_connections(len(self._clients))
        return True

    def remove(self, connection: "Connection") -> None:
        """Remove a connection; one that is not here is ignored."""
        client = self._clients.pop(connection, None)
        if client is None:
            return
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]
        self._waiting.pop(connection, None)
        self._metrics.set_connections(len(self._clients))

    def wait(self, connection: "Connection") -> None:
        """From now on the server waits for this connection's client, because the client just made progress."""
        if connection in self._clients:
            self._waiting[connection] = None
            self._waiting.move_to_end(connection)

    def serve(self, connection: "Connection") -> None:
        """From now on this connection's client waits for the server."""
        self._waiting.pop(connection, None)

    def count(self, reason: str) -> None:
        """Count a connection that is closed because of its client; the log gets one line a minute."""
        self._metrics.record_closed_connection(reason)
        self._unlogged[reason] += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_S:
            logger().warning("connections_closed", open=len(self._clients), **self._unlogged)
            self._logged_at = now
            self._unlogged.clear()

    def _make_space(self, client: str | None) -> bool:
        """Close the connection that waits longest, of `client` alone if one is named; `False` if none waits."""
        for connection in self._waiting:
            if client is None or self._clients[connection] == client:
                self.count("replaced")
                connection.end(HTTPStatus.SERVICE_UNAVAILABLE)
                return True
        return False


class Config(uvicorn.Config):
    """uvicorn's settings, and what its connections share."""

    def __init__(self, app: Any, config: ServeConfig, metrics: Metrics, **options: Any) -> None:
        super().__init__(app, http=Connection, h11_max_incomplete_event_size=config.connections.head_bytes, **options)
        self.connections = config.connections
        self.body_s = config.limits.body_s + BODY_SLACK_S
        self.table = ConnectionTable(config, metrics)


class Connection(H11Protocol):
    """A client's connection. It is closed when the client does not send a whole request in time."""

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _ERRORS
        self._table = config.table
        self._seconds = {
            Phase.HEAD: config.connections.head_s,
            Phase.BODY: config.body_s,
            Phase.IDLE: config.connections.idle_s,
            Phase.REST: config.connections.idle_s,
        }
        self._phase = Phase.HEAD
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._table.add(self, self.client[0] if self.client else ""):
            self._enter(Phase.HEAD)
        else:
            self.end(HTTPStatus.SERVICE_UNAVAILABLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._stop_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does not, after an error

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()
        if self._phase is Phase.BODY:
            self._table.wait(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # this class has its own timer
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or a head above the limit: h11's error, which is being handled, says which."""
        status = HTTPStatus(getattr(sys.exception(), "error_status_hint", HTTPStatus.BAD_REQUEST))
        self._table.count("head_too_large" if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE else "malformed")
        self.end(status)

    def end(self, status: HTTPStatus) -> None:
        """Close the connection, with an answer of that status if the client waits for one."""
        waits_for_answer = self._waits_for_answer
        self._table.remove(self)
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if waits_for_answer and not self.transport.get_write_buffer_size():
            self.transport.write(_ANSWERS.get(status, _ANSWERS[HTTPStatus.BAD_REQUEST]))
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client does not read
        else:
            self.transport.close()

    @property
    def _waits_for_answer(self) -> bool:
        """Whether the client sent something, or is about to, of which no answer has begun."""
        if self.conn.their_state is h11.ERROR or self._phase is Phase.HEAD:
            return self.cycle is None or self.cycle.response_complete or not self.cycle.response_started
        return self._phase is Phase.BODY and not self.cycle.response_started

    def _follow(self) -> None:
        """Enter the phase that h11's states show."""
        answered = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing():
            phase = Phase.IDLE  # its last bytes wait for a client that does not read them
        elif self.conn.their_state is h11.SEND_BODY:
            phase = Phase.REST if answered else Phase.BODY
        elif self.conn.their_state is h11.IDLE:
            phase = Phase.HEAD if self.cycle is None or self.conn.trailing_data[0] else Phase.IDLE
        else:
            phase = Phase.BUSY
        if phase is not self._phase:
            self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._stop_timer()
        if phase is Phase.BUSY:
            self._table.serve(self)
            return
        self._table.wait(self)
        self._timer = self.loop.call_later(self._seconds[phase], self._expire)

    def _expire(self) -> None:
        if self._phase is Phase.HEAD and not self.conn.trailing_data[0]:
            self._phase = Phase.IDLE  # it was opened and never used
        if self._phase is not Phase.IDLE:
            self._table.count(f"{self._phase.value}_timeout")
        self.end(HTTPStatus.REQUEST_TIMEOUT)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _proxy_test(proxies: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether an address is one of `proxies`, as uvicorn reads them."""
    if not proxies:
        return lambda _: False

    async def no_app(*_: Any) -> None: ...

    trusted = ProxyHeadersMiddleware(no_app, list(proxies)).trusted_hosts
    return lambda address: address in trusted


def _client_of(address: str) -> str:
    """The client to which an address belongs: in IPv6 a client has a network of 2**64 addresses."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address or "unknown"
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


def _answer(status: HTTPStatus, message: str) -> bytes:
    error = ApiError(status, message)
    body = json.dumps(error.body).encode()
    retry = "retry-after: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}{retry}content-length: {len(body)}\r\n\r\n".encode() + body


_ANSWERS = {
    status: _answer(status, message)
    for status, message in {
        HTTPStatus.BAD_REQUEST: "This is not a request in HTTP/1.1.",
        HTTPStatus.REQUEST_TIMEOUT: "The request did not arrive in time.",
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "The headers are larger than `connections.head_bytes`.",
        HTTPStatus.NOT_IMPLEMENTED: "Transfer-Encoding: only chunked is supported.",
        HTTPStatus.SERVICE_UNAVAILABLE: "There are too many connections (`connections.limit`). Ask again.",
    }.items()
}
