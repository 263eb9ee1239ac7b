"""Documents in a request's body, JSON or files in a form: parsed and split in processes that can be
stopped.

No file can stop the server or take its memory. Each upload gets a process of its own, forked from a
server that knows no model. A process that exceeds its time or memory is killed; the error says
which setting that was. One tenant never holds all of them, and a body is read only when there is a
place for it.

The thread that waits for the answer also reads it. A second thread would answer a future that is
cancelled in the same moment when the client leaves, and end with a traceback.
"""

import asyncio
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from ragkv.runtime import Check, no_check

from ..errors import ApiError
from ..settings import ParsingConfig
from ..work import TenantLimiter
from .upload_parsing import Parsed, Upload, UploadError, parse_alone

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
# The thread that waits for a process looks so often whether the client is still there.
POLL_S = 0.05
# They are loaded once, before the first upload.
LIBRARIES = ("langchain_text_splitters", "tokenizers")
# How a process ends that the system killed for its CPU time, or a library in Rust because it got no
# memory.
_ENDS = {-signal.SIGXCPU: "cpu_s", -signal.SIGABRT: "memory_bytes"}


class DocumentParser:
    """The processes that parse uploads."""

    def __init__(self, config: ParsingConfig) -> None:
        self._config = config
        self._limiter = TenantLimiter(config.workers, max(1, config.workers - 1))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([parse_alone.__module__, *LIBRARIES])

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """A place for one upload of the tenant inside the block. Raises `ApiError` 503 if none
        became free in time.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._config.wait_s):
                    await stack.enter_async_context(self._limiter.hold(tenant))
            except TimeoutError:
                waited = f"{self._config.wait_s:g} s (parsing.wait_s)"
                message = (
                    f"Other uploads are being parsed, and none ended within {waited}. Ask again."
                )
                raise ApiError(503, message, "uploads_busy", retry_after_s=RETRY_AFTER_S) from None
            yield

    def parse(self, upload: Upload, body: bytes, check: Check = no_check) -> Parsed:
        """The documents of an upload that has a place, and their passages. Blocks.

        Raises `UploadError`, `ApiError` if time or memory is used up, and what `check` raises,
        which kills the process.
        """
        ends = time.monotonic() + self._config.wall_s
        with self._process(upload, body) as (process, answer):
            try:
                while not answer.poll(POLL_S):
                    check()
                found = answer.recv()
            except (EOFError, OSError):  # it ended before it answered, or while it did
                process.join()
                is_late = time.monotonic() >= ends
                setting = "wall_s" if is_late else _ENDS.get(process.exitcode or 0)
                raise self._spent_error(setting) from None
        if found is None:
            raise self._spent_error("memory_bytes")
        if isinstance(found, UploadError):
            raise found
        if isinstance(found, str):
            raise self._failed_error(found)
        assert isinstance(found, Parsed)
        return found

    @contextmanager
    def _process(
        self, upload: Upload, body: bytes
    ) -> Iterator[tuple[ForkServerProcess, Connection]]:
        """A process that parses, and where it answers. It ends with the block, or after `wall_s`.
        Blocks until it has the body.
        """
        answer, writer = self._context.Pipe(duplex=False)
        limits = (self._config.cpu_s, self._config.memory_bytes)
        arguments = (writer, upload, body, *limits)
        process = self._context.Process(
            target=parse_alone, args=arguments, name="ragkv-parse", daemon=True
        )
        clock = threading.Timer(self._config.wall_s, process.kill)
        clock.daemon = True
        with answer:
            try:
                with writer:
                    process.start()
            except (OSError, EOFError) as error:
                log.error("Process that parses uploads does not start: %s", error)
                message = (
                    "The parser of uploads does not start now, whatever the documents are. "
                    "Send them again later."
                )
                raise ApiError(
                    503, message, "parser_unavailable", retry_after_s=RETRY_AFTER_S
                ) from error
            try:
                clock.start()
                yield process, answer
            finally:
                clock.cancel()
                process.kill()
                process.join()

    def _spent_error(self, setting: str | None) -> ApiError:
        """`setting`: which one was met; `None`: the process ended for another reason."""
        if setting is None:
            return self._failed_error("the process ended")
        limits: dict[str, Any] = {
            "wall_s": f"{self._config.wall_s:g} s",
            "cpu_s": f"{self._config.cpu_s} s of CPU time",
            "memory_bytes": f"{self._config.memory_bytes} bytes of memory",
        }
        message = (
            f"Parsing took more than {limits[setting]} (parsing.{setting}). Send fewer or "
            "simpler documents at once, "
            "or raise the setting."
        )
        return ApiError(400, message, "document_limit", "documents")

    def _failed_error(self, reason: str) -> ApiError:
        log.warning("Process that parsed an upload failed: %s", reason)
        return ApiError(
            400,
            "The documents could not be parsed: the parser failed.",
            "parser_failed",
            "documents",
        )
