"""Whether the server lives, takes requests, and what it is: /livez, /readyz, /version. None needs a key.

Ready is: the model is loaded, nobody asked the server to end, and a file can be written beside every open tenant's KV.
The last is tried for real, at most every few seconds, and never twice at once: a disk that hangs holds one thread.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
import transformers
from fastapi import APIRouter, Response
from pydantic import BaseModel

from ragkv import __version__

from .logs import logger
from .server import Readiness

PROBED_FOR_S = 5.0  # how long a probe's verdict is believed
PROBE_BYTES = 4096
PROBE_WAIT_S = 3.0  # a disk that takes longer for one page is not ready


class Health(BaseModel):
    """How the server is."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None


class Version(BaseModel):
    """What the server is."""

    ragkv: str
    torch: str
    transformers: str


class Probe:
    """Whether the directories can be written to."""

    def __init__(self, directories: Callable[[], Sequence[Path]], believed_s: float = PROBED_FOR_S) -> None:
        self._directories, self._believed_s = directories, believed_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-probe")
        self._tried: asyncio.Future[str | None] | None = None
        self._tried_at = 0.0

    async def fault(self) -> str | None:
        """What is wrong with them; `None`: nothing."""
        now = time.monotonic()
        done = self._tried is None or self._tried.done()
        if self._tried is None or (done and now - self._tried_at > self._believed_s):
            self._tried_at = now
            tried = self._thread.submit(_write_all, self._directories())
            self._tried = asyncio.wrap_future(tried)
        try:
            return await asyncio.wait_for(asyncio.shield(self._tried), PROBE_WAIT_S)
        except TimeoutError:
            return "A store's disk does not answer."


def router(gate: Readiness, probe: Probe) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["health"])

    @routes.get("/livez")
    async def livez() -> Health:
        """The process answers."""
        return Health(status="ok")

    @routes.get("/readyz", responses={503: {"model": Health, "description": "Not taking requests"}})
    async def readyz(response: Response) -> Health:
        """Requests are taken."""
        reason = gate.unavailable_reason or await probe.fault()
        response.headers["cache-control"] = "no-store"
        if reason is None:
            return Health(status="ok")
        response.status_code = 503
        return Health(status="unavailable", reason=reason)

    @routes.get("/version")
    async def version() -> Version:
        """What runs."""
        return Version(ragkv=__version__, torch=torch.__version__, transformers=transformers.__version__)

    return routes


def _write_all(directories: Sequence[Path]) -> str | None:
    for directory in directories:
        try:
            _write(directory / "tmp" if (directory / "tmp").is_dir() else directory)
        except OSError as error:
            logger().error("store_not_writable", directory=str(directory), errno=error.errno)
            return f"A store cannot be written to: {error.strerror}."
    return None


def _write(directory: Path) -> None:
    """Write a page, make it durable and remove it; what a kill leaves in `tmp` the store sweeps when it is opened."""
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".probe-")
    try:
        os.write(descriptor, bytes(PROBE_BYTES))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        Path(name).unlink()


__all__ = ["Health", "Probe", "Version", "router"]
