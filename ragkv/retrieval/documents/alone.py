"""Parses files in a process of its own, which is ended when a file takes too much time or memory.

The command line reads files this way, as the server does: a file that a parser of someone else
cannot bear costs this file. The process is forked from a server that knows no model, and reads one
file after another.
"""

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from ragkv.errors import DocumentError, RagKVError
from ragkv.runtime import Closing

from ..values import Document
from .loaders import load_bytes
from .reading import ParseLimits

MIB = 1024**2
# Of one file. The largest that was tried, a PDF of 1,800 pages, takes 20 s and 300 MiB.
PARSE_S = 300
PARSE_BYTES = 2048 * MIB


class LoneParser(Closing):
    """A process that parses files. It starts with the first file. Not for several threads."""

    def __init__(self, seconds: float = PARSE_S, memory_bytes: int = PARSE_BYTES) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._pool: ProcessPool | None = None

    def load(
        self, file: Path, data: bytes, encoding: str | None, limits: ParseLimits
    ) -> Iterator[Document | DocumentError]:
        """What `load_bytes` gives. Raises `DocumentError` for a file that took too much, too."""
        future = self._started().schedule(
            _load, args=(file, data, encoding, limits), timeout=self._seconds
        )
        try:
            found = future.result()
        except FutureTimeoutError:
            raise DocumentError(
                f"Reading {file} took more than {self._seconds:g} s. Split it, or save it in a "
                "simpler format."
            ) from None
        except MemoryError:
            raise DocumentError(self._too_large(file)) from None
        except ProcessExpired as error:
            raise DocumentError(
                f"{self._too_large(file)} Or its parser failed: the process ended with "
                f"{error.exitcode}."
            ) from None
        if isinstance(found, RagKVError):
            raise found
        yield from found

    def close(self) -> None:
        """End the process. May be called twice."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def _started(self) -> ProcessPool:
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._pool = ProcessPool(
                max_workers=1,
                context=context,
                initializer=_limit_process,
                initargs=(self._memory_bytes,),
            )
        return self._pool

    def _too_large(self, file: Path) -> str:
        return (
            f"Reading {file} took more than {self._memory_bytes // MIB} MiB of memory. Split it, or "
            "save it in a simpler format."
        )


def _load(
    file: Path, data: bytes, encoding: str | None, limits: ParseLimits
) -> list[Document | DocumentError] | RagKVError:
    """All that a loader gives, or the error that it raises."""
    try:
        return list(load_bytes(file, data, encoding, limits))
    except RagKVError as error:
        return error


def _limit_process(memory_bytes: int) -> None:
    """No output, because libraries quote what they read, and so much memory more than now."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        os.dup2(nowhere, output)
    with contextlib.suppress(OSError, ValueError):  # Linux only
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + memory_bytes, held + memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
