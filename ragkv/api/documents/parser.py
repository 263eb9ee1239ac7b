"""Documents in a request's body, JSON or files in a form: parsed and split in processes that can be
stopped.

No file can stop the server or take its memory. Each upload gets a process of its own (pebble),
forked from a server that knows no model. A process that exceeds its time or memory is killed; the
error says which setting that was. One tenant never holds all of them, and a body is read only when
there is a place for it.
"""

import asyncio
import logging
import multiprocessing
import signal
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from pebble import ProcessExpired, concurrent

from ragkv.runtime import Check, no_check

from ..errors import ApiError
from ..settings import ParsingConfig
from ..work import TenantLimiter
from .upload_parsing import Parsed, Upload, UploadError, parse_alone

log = logging.getLogger(__name__)

Parsing = futures.Future[Parsed | UploadError | None]  # as `parse_alone` returns it

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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([parse_alone.__module__, *LIBRARIES])
        # pebble's types call its `context` by another name than its code does.
        process: Any = concurrent.process
        in_process = process(
            name="ragkv-parse", daemon=True, timeout=config.wall_s, context=context
        )
        self._start: Callable[..., Parsing] = in_process(parse_alone)

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
        parsing = self._begin(upload, body)
        try:
            while not parsing.done():
                check()
                futures.wait([parsing], POLL_S)
            return self._outcome(parsing)
        finally:
            parsing.cancel()

    def _outcome(self, parsing: Parsing) -> Parsed:
        try:
            found = parsing.result()
        except TimeoutError:
            raise self._spent_error("wall_s") from None
        except ProcessExpired as error:
            raise self._spent_error(_ENDS.get(error.exitcode)) from error
        except Exception as error:  # a parser's own; it may quote the upload
            raise self._failed_error(type(error).__name__) from None
        if found is None:
            raise self._spent_error("memory_bytes")
        if isinstance(found, UploadError):
            raise found
        return found

    def _begin(self, upload: Upload, body: bytes) -> Parsing:
        """Start a process, which takes the body through a pipe. Blocks for as long as that
        takes.
        """
        try:
            return self._start(upload, body, self._config.cpu_s, self._config.memory_bytes)
        except (OSError, EOFError) as error:
            log.error("Process that parses uploads does not start: %s", error)
            message = (
                "The parser of uploads does not start now, whatever the documents are. "
                "Send them again later."
            )
            raise ApiError(
                503, message, "parser_unavailable", retry_after_s=RETRY_AFTER_S
            ) from error

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
