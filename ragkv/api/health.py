"""The monitoring routes /livez, /readyz and /metrics. None needs an API key.

The server is ready when its model is loaded, it is not shutting down, a file can be written to the KV directory of
every open tenant, and the vLLM server that computes its answers, if one does, is healthy and has the same model. The
write is really tried, at most every few seconds and never twice at once, so a hanging disk blocks one thread only.
"""

import asyncio
import hmac
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from .errors import ApiError, invalid_key
from .logs import logger
from .middleware.auth import came_through_proxy
from .server_state import ServerState

PROBE_INTERVAL_S = 5.0  # The result of a write probe is reused for so long.
PROBE_BYTES = 4096
PROBE_WAIT_S = 3.0  # A disk that needs longer for one page is not ready.
# What a replica does without while shared storage does not answer.
CONVERSATIONS = (
    "The Redis server of the conversations does not answer: a request that names a conversation is refused with 503, "
    "and a conversation without a name is computed from its messages."
)


class HealthBody(BaseModel):
    """The server's health."""

    status: Literal["ok", "unavailable"] = Field(description="ok: all is well.")
    reason: str | None = Field(default=None, description="Why it is unavailable.")


class Ready(HealthBody):
    """Whether requests are accepted, and what they do without."""

    degraded: list[str] = Field(default=[], description="What does not answer, and what that means; requests go on.")


class WriteProbe:
    """Tests whether files can be written to some directories."""

    def __init__(self, directories: Callable[[], Sequence[Path]], interval_s: float = PROBE_INTERVAL_S) -> None:
        self._directories, self._interval_s = directories, interval_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-probe")
        self._result: asyncio.Future[str | None] | None = None
        self._began = 0.0

    async def failure(self) -> str | None:
        """Why the directories cannot be written to; `None` if they can."""
        now = time.monotonic()
        if self._result is None or (self._result.done() and now - self._began > self._interval_s):
            self._began = now
            self._result = asyncio.wrap_future(self._thread.submit(_write_to_all, self._directories()))
        try:
            return await asyncio.wait_for(asyncio.shield(self._result), PROBE_WAIT_S)
        except TimeoutError:
            return "A store's disk does not answer."


def router(server: ServerState, probe: WriteProbe) -> APIRouter:
    """The monitoring routes of one server."""
    routes = APIRouter(tags=["health"])

    @routes.get("/livez")
    async def livez() -> HealthBody:
        """The process answers."""
        return HealthBody(status="ok")

    @routes.get("/readyz", responses={503: {"model": Ready, "description": "Not accepting requests"}})
    async def readyz(response: Response) -> Ready:
        """Requests are accepted."""
        reason = server.readiness.unavailable_reason or await probe.failure()
        if reason is None and server.vllm is not None:
            reason = await asyncio.to_thread(server.vllm.failure)
        response.headers["cache-control"] = "no-store"
        if reason is None:
            return Ready(status="ok", degraded=described(await asyncio.to_thread(server.away)))
        response.status_code = 503
        return Ready(status="unavailable", reason=reason)

    @routes.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics: with the token if one is set, otherwise for this machine only."""
        token = server.config.auth.metrics_token
        if token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise invalid_key("The metrics require the token of the setting auth.metrics_token.")
        elif not server.config.is_private or came_through_proxy(request.headers):
            raise ApiError(403, "The metrics are for this machine only. Set auth.metrics_token to read them remotely.")
        is_ready = server.readiness.unavailable_reason is None
        return Response(await asyncio.to_thread(server.metrics.render, is_ready), media_type=CONTENT_TYPE_LATEST)

    return routes


def described(away: Iterable[str]) -> list[str]:
    """A sentence for each thing that does not answer; `away` is as in `Engine.away`."""
    tier = "{} does not answer: what only it holds is computed, and other replicas do not find what is stored here now."
    return [CONVERSATIONS if name == "conversations" else tier.format(name) for name in sorted(set(away))]


def _write_to_all(directories: Sequence[Path]) -> str | None:
    for directory in directories:
        try:
            _write(directory / "tmp" if (directory / "tmp").is_dir() else directory)
        except OSError as error:
            logger().error("store_not_writable", directory=str(directory), errno=error.errno)
            return f"A store cannot be written to: {error.strerror}."
    return None


def _write(directory: Path) -> None:
    """Write a page durably and remove it. After a kill, the store removes the file from `tmp` when it is opened."""
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".probe-")
    try:
        os.write(descriptor, bytes(PROBE_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        Path(name).unlink()
