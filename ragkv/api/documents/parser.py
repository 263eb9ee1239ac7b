"""Parses uploads in processes that can be killed, so that no file can stop the server or take its memory.

An upload holds two slots, one after the other: one from before its body is read, which bounds the memory of bodies, and
one while a process parses it. Both are shared fairly between tenants. A process that exceeds its time or memory is
killed and replaced; the error says which setting that was. Nothing is stored before all of an upload is parsed.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from ragkv.retrieval import Document
from ragkv.runtime import Closing
from ragkv.runtime.worker_process import WorkBudget, WorkerEndedError, WorkerProcess, WorkerStartError

from ..errors import ApiError
from ..settings import LimitsConfig, ParsingConfig
from ..work.fair_slots import FairSlots, NoSlotError
from ..work.worker_pool import consume_exception
from .upload_parsing import Upload
from .upload_worker import decode_documents

log = logging.getLogger(__name__)

MODULE = "ragkv.api.documents.upload_worker"
RETRY_AFTER_S = 5
_SPENT = {
    "wall_s": "{0.wall_s:g} s",
    "cpu_s": "{0.cpu_s:g} s of CPU time",
    "memory_bytes": "{0.memory_bytes} bytes of memory",
}


class DocumentParser(Closing):
    """The processes that parse uploads. They start when they are needed."""

    def __init__(self, config: ParsingConfig, limits: LimitsConfig) -> None:
        self._config = config
        self._budget = WorkBudget(config.wall_s, config.cpu_s, config.memory_bytes, _answer_bytes(limits))
        self._uploads = FairSlots(config.uploads, config.tenant_uploads)
        self._parsing = FairSlots(config.workers, max(1, config.workers - 1))
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="ragkv-parse")
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._closed = False

    async def receive(self, tenant: str, work: Callable[[], Awaitable[list[Document]]]) -> list[Document]:
        """What `work` returns, which reads and parses a body; waits until the tenant may send one more."""
        try:
            async with self._uploads.hold(tenant, self._config.wait_s):
                return await work()
        except NoSlotError:
            raise self._busy_error() from None

    async def parse(self, tenant: str, upload: Upload, body: bytes) -> list[Document]:
        """The documents of an upload. Raises `UploadError`, and `ApiError` if the budget is used up.

        If the task is cancelled, the process is killed.
        """
        try:
            async with self._parsing.hold(tenant, self._config.wait_s):
                return await self._parse_on_thread(upload, body)
        except NoSlotError:
            raise self._busy_error() from None

    def close(self) -> None:
        """Kill the processes. Blocks for a moment."""
        with self._lock:
            self._closed = True
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.kill()
        self._threads.shutdown()
        for worker in workers:
            worker.close()

    async def _parse_on_thread(self, upload: Upload, body: bytes) -> list[Document]:
        worker = self._take()
        call = asyncio.get_running_loop().run_in_executor(self._threads, self._call, worker, upload, body)
        call.add_done_callback(consume_exception)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            worker.kill()
            await asyncio.wait({call})
            raise

    def _call(self, worker: WorkerProcess, upload: Upload, body: bytes) -> list[Document]:
        try:
            return decode_documents(worker.call([json.dumps(upload.as_dict()).encode(), body], self._budget))
        except WorkerStartError as error:
            raise self._start_error(error) from error
        except WorkerEndedError as error:
            raise self._ended_error(error) from error
        except (ValueError, KeyError, TypeError) as error:  # a parser that a file has taken over may answer anything
            worker.close()
            raise self._failed_error(None) from error
        finally:
            self._give_back(worker)

    def _take(self) -> WorkerProcess:
        """An idle process, or a new one. The caller holds a slot."""
        with self._lock:
            if self._closed:
                raise ApiError(503, "The server is shutting down. Ask again.", "shutting_down", retry_after_s=5)
            while self._idle:
                worker = self._idle.pop()
                if not worker.ended:
                    break
                worker.close()
            else:
                try:
                    worker = WorkerProcess(MODULE)
                except OSError as error:
                    raise self._start_error(error) from error
            self._busy.add(worker)
            return worker

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._busy.discard(worker)
            if not self._closed and not worker.ended:
                self._idle.append(worker)
                return
        worker.close()

    def _busy_error(self) -> ApiError:
        waited = f"{self._config.wait_s:g} s (parsing.wait_s)"
        message = f"Other uploads are being parsed, and none ended within {waited}. Ask again."
        return ApiError(503, message, "uploads_busy", retry_after_s=RETRY_AFTER_S)

    def _start_error(self, error: Exception) -> ApiError:
        if not self._closed:
            log.error("Process that parses uploads does not start: %s", error)
        message = "The parser of uploads does not start now, whatever the documents are. Send them again later."
        return ApiError(503, message, "parser_unavailable", retry_after_s=RETRY_AFTER_S)

    def _ended_error(self, error: WorkerEndedError) -> ApiError:
        if error.exhausted is None:
            return self._failed_error(error.status)
        limit = _SPENT[error.exhausted].format(self._config)
        message = (
            f"Parsing took more than {limit} (parsing.{error.exhausted}). Send fewer or simpler documents at once, or "
            "raise the setting."
        )
        return ApiError(400, message, "document_limit", "documents")

    def _failed_error(self, status: int | None) -> ApiError:
        if not self._closed:
            log.warning("Process that parsed an upload failed, status %s", status)
        return ApiError(400, "The documents could not be parsed: the parser failed.", "parser_failed", "documents")


def _answer_bytes(limits: LimitsConfig) -> int:
    """The most bytes a parser may answer: texts in UTF-8, and for each document its metadata, id and page starts."""
    return 4 * limits.upload_chars + limits.documents * (8 * limits.metadata_chars + 32 * limits.pages + 65_536)
