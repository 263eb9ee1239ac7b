"""The uvicorn server: how it starts, and how it shuts down.

It listens on loopback, behind nginx (`deploy/nginx.conf`). nginx bounds connections, heads, bodies,
rates and times, so this process sees whole requests and does none of that again.

On SIGTERM or SIGINT it takes no new connections, and running requests may finish for up to
`graceful_s`. Then it cancels the rest, which end at their next check, and closes its tenants,
which writes what they hold in memory. `close_s` later the process ends, whatever still runs. A
second signal ends it immediately; the store survives both.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragkv.errors import ConfigError
from ragkv.runtime import begun, limit_arenas, server_file

from .keys import KeyRing
from .logs import configure_logging, log
from .service import Service
from .settings import ServeConfig

# A cut request may take this share of `close_s` to end before its socket is closed.
CUT_SHARE = 0.5
# Twice the time of nginx, which so never sends on a connection that ends here.
KEEP_ALIVE_S = 60
HEAD_BYTES = 32 * 1024  # of a request's line and headers, at most: more than nginx passes on
# A thread that wants Python's lock gets it after this time: the event loop waits for answers.
SWITCH_S = 0.0002
# Parsing a piece of a body takes some 30 microseconds on the event loop, and six bytes on the wire
# are enough for a piece. Without these limits a body of 32 MiB would hold all other requests for
# minutes. nginx passes bodies on whole.
FREE_PIECES = 1000  # pieces that a body may have, whatever is in them
PIECE_BYTES = 512  # for so many bytes a body may have one more piece
WITHOUT_NGINX = (
    "Nothing bounds connections, slow clients and rates here, and there is no TLS: listen on "
    "127.0.0.1 and put nginx "
    "with deploy/nginx.conf in front (docs/deploy.md)."
)


class BoundedConnection(h11.Connection):
    """The server's side of a connection, which ends with a body that is in too small pieces."""

    def __init__(self, head_bytes: int | None, end: Callable[[], None]) -> None:
        """`end` closes the connection. A head may have `head_bytes`; `None`: as h11 says."""
        most = {} if head_bytes is None else {"max_incomplete_event_size": head_bytes}
        super().__init__(h11.SERVER, **most)
        self._end = end
        self._bytes_ahead = FREE_PIECES * PIECE_BYTES

    def next_event(self) -> Any:
        """The next event; pieces of a body are counted."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._bytes_ahead = FREE_PIECES * PIECE_BYTES
        elif isinstance(event, h11.Data):
            self._bytes_ahead += min(0, len(event.data) - PIECE_BYTES)
            if self._bytes_ahead < 0:
                self._end()
                return h11.NEED_DATA
        return event


class Protocol(H11Protocol):
    """uvicorn's protocol on such connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection(self.config.h11_max_incomplete_event_size, self._end)

    def _end(self) -> None:
        log.warning("connection_ended", reason="a body came in too many small pieces")
        self.transport.abort()


class GracefulServer(uvicorn.Server):
    """A uvicorn server that cuts requests which do not finish in time, and whose process always
    ends.
    """

    def __init__(
        self, config: uvicorn.Config, cancel_all: Callable[[], None], settings: ServeConfig
    ) -> None:
        """`cancel_all` cancels the running requests."""
        super().__init__(config)
        self._cancel_all = cancel_all
        self._settings = settings
        self._requests = 0
        self._used_at = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: after a signal, or when no request ran for `idle_s`."""
        state = self.server_state
        if state.tasks or state.total_requests != self._requests:
            self._requests = state.total_requests
            self._used_at = time.monotonic()
        idle_s = self._settings.idle_s
        is_idle = idle_s is not None and time.monotonic() - self._used_at > idle_s
        return await super().on_tick(counter) or is_idle

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn and log its addresses."""
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            log.info("listening", host=host, port=port, pid=os.getpid())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down on the first signal, end on the second. It may interrupt any code, so it takes
        no lock.
        """
        if self.should_exit:
            os._exit(128 + sig)  # no waiting for computing threads; the store survives a kill
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connections, wait for the running requests, and close the app."""
        log.info("draining")
        begun(self._end_in_time, "ragkv-end", "running requests are waited for without an end")
        await super().shutdown(sockets)

    def _end_in_time(self) -> None:
        """Cut the requests that still run after `graceful_s`, and end the process `close_s` later,
        whatever runs.
        """
        graceful_s = self._settings.graceful_s
        time.sleep(graceful_s)
        log.info("cut", after_s=graceful_s)
        self._cancel_all()
        time.sleep(self._settings.close_s)
        names = sorted(
            {thread.name for thread in threading.enumerate() if thread.name.startswith("ragkv-")}
        )
        log.error("ended_by_force", after_s=graceful_s + self._settings.close_s, threads=names)
        os._exit(1)


def check_network_exposure(config: ServeConfig, keys: KeyRing) -> None:
    """Raise `ConfigError` if other machines could send requests without a key and `auth.required`
    is not off.

    On an address other than loopback the log says what is missing there.
    """
    if config.auth.required and not keys.exists and not config.is_private:
        reached = "The proxy in front" if config.on_loopback else config.host
        raise ConfigError(
            f"{reached} can be reached from other machines, and there are no keys at "
            f"{config.keys_path}. Make one with "
            "`ragkv keys add NAME`, listen on 127.0.0.1 without `proxies`, or let anyone in with "
            "--no-auth."
        )
    if not config.on_loopback:
        log.warning("listening_without_nginx", host=config.host, hint=WITHOUT_NGINX)


def serve(app: FastAPI, config: ServeConfig, listener: socket.socket | None = None) -> None:
    """Serve an app made by `create_app` until a signal ends the server; at `listener`, if one is
    given, which is closed with it.
    """
    service: Service = app.state.service
    configure_logging(config.log, service.replica)
    limit_arenas()
    sys.setswitchinterval(SWITCH_S)
    check_network_exposure(config, service.keys)
    settings = uvicorn.Config(
        app,
        http=Protocol,  # of h11: httptools does not bound a head
        h11_max_incomplete_event_size=HEAD_BYTES,
        loop="asyncio",  # everywhere the same, whatever is installed
        ws="none",
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.proxies),
        forwarded_allow_ips=list(config.proxies),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.graceful_s + CUT_SHARE * config.close_s)),
        lifespan="on",
    )
    # accepted connections inherit its options
    listener = settings.bind_socket() if listener is None else listener
    # asyncio sets this itself only where the socket names its protocol, which uvicorn's does not.
    # Without it a small answer of two parts takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.ExitStack() as stack:
        if config.on_loopback:
            _announce(stack, config, listener, service.replica)
        GracefulServer(settings, service.cancel_all, config).run(sockets=[listener])
    log.info("closed")


def _announce(
    stack: contextlib.ExitStack, config: ServeConfig, listener: socket.socket, replica: str
) -> None:
    """While `stack` is open, the home says where the server listens, so that `ragkv ask` there asks
    the server.
    """
    host, port = listener.getsockname()[:2]
    address = server_file.ServerAddress.of_this_process(host, port, config.model, replica)
    try:
        stack.enter_context(server_file.announced(Path(config.home), address))
    except OSError as error:  # everything else works
        log.warning("address_not_saved", reason=str(error))
