"""Documents in a request's body, JSON or files in a form: parsed and split in processes that can be
stopped.

No file can stop the server or take its memory. Each upload is parsed in its own process. A process
that exceeds its time or memory is killed, and the error names the setting. One tenant never holds
all processes, and a body is read only when one is free.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from ragkv.runtime import Check, no_check
from ragkv.runtime.lone_process import Bounds, LoneProcess, LoneProcessError, NotStartedError

from ..errors import ApiError
from ..settings import ParsingConfig
from ..work import TenantLimiter
from .upload_parsing import LIMIT_CODE, Parsed, Upload, parse_and_split

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
NICENESS = 10  # Answers are computed first.
# They are loaded once, before the first upload.
LIBRARIES = (parse_and_split.__module__, "langchain_text_splitters", "tokenizers")


class DocumentParser:
    """The processes that parse uploads."""

    def __init__(self, config: ParsingConfig) -> None:
        self._config = config
        self._limiter = TenantLimiter(config.workers, max(1, config.workers - 1))
        self._bounds = Bounds(config.wall_s, config.memory_bytes, config.cpu_s)

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

        Raises `ApiError`, also if time or memory is used up, and what `check` raises, which kills
        the process.
        """
        with LoneProcess("ragkv-parse", LIBRARIES, NICENESS) as process:
            try:
                return process.run(self._bounds, parse_and_split, upload, body, check=check)
            except LoneProcessError as error:
                raise self._failed(error) from None
            except NotStartedError as error:
                log.error("Process that parses uploads does not start: %s", error)
                message = (
                    "The parser of uploads does not start now, whatever the documents are. "
                    "Send them again later."
                )
                raise ApiError(
                    503, message, "parser_unavailable", retry_after_s=RETRY_AFTER_S
                ) from error

    def _failed(self, error: LoneProcessError) -> ApiError:
        if error.bound is None:
            log.warning("Process that parsed an upload failed: %s", error.reason)
            message = "The documents could not be parsed: the parser failed."
            return ApiError(400, message, "parser_failed", "documents")
        most = {
            "wall_s": f"{self._config.wall_s:g} s",
            "cpu_s": f"{self._config.cpu_s} s of CPU time",
            "memory_bytes": f"{self._config.memory_bytes} bytes of memory",
        }[error.bound]
        message = (
            f"Parsing took more than {most} (parsing.{error.bound}). Send fewer or simpler "
            "documents at once, or raise the setting."
        )
        return ApiError(400, message, LIMIT_CODE, "documents")
