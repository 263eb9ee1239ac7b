"""How the server begins and ends.

It answers 503 until its model is loaded. On SIGTERM or SIGINT it still listens, answers new requests and /readyz with
503, lets running answers finish for as long as `graceful_s`, cuts the others, and then closes its tenants, which writes
what they hold. A second signal ends the process at once; what a kill leaves behind the store can live with.
"""

import asyncio
import contextlib
import os
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn

from ragkv.errors import ConfigError

from .errors import ApiError
from .keys import KeyRing
from .logs import configure_logging, logger
from .settings import ServeConfig

POLL_S = 0.05
CUT_S = 5  # what a request that was cut has to end in, before the sockets are closed over it
BACKLOG = 512


class Readiness:
    """Whether requests are taken, and how many are being answered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: str | None = "The model is being loaded."
        self._draining = False
        self._running = 0

    @property
    def unavailable_reason(self) -> str | None:
        """Why no request is taken; `None`: they are."""
        return "The server is shutting down." if self._draining else self._why

    @property
    def draining(self) -> bool:
        """Whether the server is ending."""
        return self._draining

    @property
    def running(self) -> int:
        """Requests being answered."""
        return self._running

    def ready(self) -> None:
        """The model is loaded: take requests."""
        self._why = None

    def failed(self, why: str) -> None:
        """No request can be answered, and why."""
        self._why = why

    def start_draining(self) -> None:
        """Take no more. Called by a signal's handler: it must not wait for a lock."""
        self._draining = True

    def enter(self) -> None:
        """One more request; raises `ApiError` 503 if it is not taken. Who enters leaves."""
        with self._lock:
            if (why := self.unavailable_reason) is not None:
                after_s, code = (5, "shutting_down") if self._draining else (2, "not_ready")
                raise ApiError(503, f"{why} Ask again.", code=code, retry_after_s=after_s)
            self._running += 1

    def leave(self) -> None:
        """One fewer."""
        with self._lock:
            self._running -= 1


class Server(uvicorn.Server):
    """Uvicorn, which drains before it stops listening."""

    def __init__(self, config: uvicorn.Config, gate: Readiness, graceful_s: float) -> None:
        super().__init__(config)
        self._gate, self._graceful_s = gate, graceful_s
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's; says where it listens, once it does."""
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            logger().info("listening", host=host, port=port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first begins the end, the second is the end. It interrupts anything, so it takes no lock."""
        if self._gate.draining:
            os._exit(128 + sig)  # the store survives a kill; waiting for threads that compute is what was not wanted
        self._gate.start_draining()

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn asks ten times a second whether to stop."""
        if self._gate.draining and self._drain is None:
            logger().info("draining", running=self._gate.running)
            self._drain = asyncio.get_running_loop().create_task(self._drained())
        return await super().on_tick(counter)

    async def _drained(self) -> None:
        ends = asyncio.get_running_loop().time() + self._graceful_s
        while self._gate.running and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(POLL_S)
        logger().info("drained", cut=self._gate.running)
        self.should_exit = True


def check_network_exposure(config: ServeConfig, ring: KeyRing) -> None:
    """Raise `ConfigError` if other machines could ask without a key and nobody said they may."""
    if not config.on_loopback and config.auth.required and not ring.exists:
        raise ConfigError(
            f"{config.host} can be reached from other machines, and there are no keys at {config.keys_path}. Make one "
            "with `ragkv keys add NAME`, listen on 127.0.0.1, or let anyone in with --no-auth."
        )


def serve(app: Any, config: ServeConfig) -> None:
    """Listen until a signal ends it. `app` has been given its conduct."""
    configure_logging(config.log)
    conduct = app.state.server
    check_network_exposure(config, conduct.keys)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        proxy_headers=bool(config.proxies),
        forwarded_allow_ips=list(config.proxies),
        timeout_graceful_shutdown=CUT_S,
        lifespan="on",
    )
    listening = settings.bind_socket()
    with contextlib.suppress(AttributeError, OSError):  # Linux has it; whoever is accepted here inherits it
        # Who leaves an answer unread is forgotten by the kernel too, which would keep it for as long as they like.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(config.limits.stall_s * 1000))
    Server(settings, conduct.readiness, config.graceful_s).run(sockets=[listening])


__all__ = ["Readiness", "Server", "check_network_exposure", "serve"]
