"""Parses files in a separate process, which is ended when a file takes too much time or memory.

The command line reads files in this way, and so does the server. A file that breaks a parser fails
alone.
"""

from collections.abc import Iterator
from pathlib import Path

from ragkv.errors import DocumentError
from ragkv.runtime import Closing
from ragkv.runtime.lone_process import Bounds, LoneProcess, LoneProcessError

from ..ingested import Document
from .loaders import load_bytes
from .reading import ParseLimits

MIB = 1024**2
# Of one file. The largest that was tried, a PDF of 1,800 pages, takes 20 s and 300 MiB.
PARSE_S = 300
PARSE_BYTES = 2048 * MIB


class LoneParser(Closing):
    """A process that parses files. It starts with the first file. Not thread-safe."""

    def __init__(self, seconds: float = PARSE_S, memory_bytes: int = PARSE_BYTES) -> None:
        self._bounds = Bounds(seconds, memory_bytes)
        self._process = LoneProcess("ragkv-read", [__name__])

    def load(
        self, file: Path, data: bytes, encoding: str | None, limits: ParseLimits
    ) -> Iterator[Document | DocumentError]:
        """What `load_bytes` gives. Raises `DocumentError` for a file that took too much, too."""
        try:
            yield from self._process.run(self._bounds, _load, file, data, encoding, limits)
        except LoneProcessError as error:
            took = {
                "wall_s": f"took more than {self._bounds.wall_s:g} s",
                "memory_bytes": f"took more than {self._bounds.memory_bytes // MIB} MiB of memory",
            }.get(error.bound or "", f"failed: {error.reason}")
            raise DocumentError(
                f"Reading {file} {took}. Split it, or save it in a simpler format."
            ) from None

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _load(
    file: Path, data: bytes, encoding: str | None, limits: ParseLimits
) -> list[Document | DocumentError]:
    return list(load_bytes(file, data, encoding, limits))
