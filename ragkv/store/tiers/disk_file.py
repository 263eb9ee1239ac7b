"""One entry file open for reading, through the page cache or past it.

Past it (O_DIRECT) memory, offset and length must be multiples of a page. Layers begin at one in the file, and what
follows a layer up to the next page is padding, so only the memory is in question: an aligned buffer is read into where
it is, its last part of a page by the way of a spare one in the same request, and any other by the way of this thread's
scratch memory. The head is read past the page cache too: through it, the kernel would read far ahead into the layers.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from ..record import ALIGNMENT, Head, bytes_of, parse_head, read_fully, read_head

_HELD = threading.local()  # by thread: memory that lives as long as it, of the largest layer it met


class EntryFile:
    """A descriptor and how to read by it."""

    def __init__(self, fd: int, path: Path, direct: bool) -> None:
        self._fd, self._path, self._direct = fd, path, direct

    @classmethod
    def open(cls, path: Path, direct: bool) -> Self:
        """Open `path`, past the page cache if asked and where system and file system have it. Raises `OSError`."""
        flag = getattr(os, "O_DIRECT", None)
        if direct and flag is not None:
            with contextlib.suppress(OSError):  # what is wrong with the file itself is met again below
                return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag), path, True)
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, False)

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache, so that no kernel reads ahead."""
        return self._direct

    def close(self) -> None:
        """Let the descriptor go; once only."""
        os.close(self._fd)

    def head(self, key: str) -> Head:
        """See `read_head`."""
        if not self._direct:
            return read_head(self._fd, key)
        try:
            return parse_head(key, self._first, os.fstat(self._fd).st_size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fall_back()  # the file system opens so, but does not read so
            return read_head(self._fd, key)

    def read(self, into: torch.Tensor, offset: int) -> int:
        """Fill `into` (bytes, on the host) from `offset`, a multiple of a page; the bytes got, fewer at the file's end.

        Releases the GIL. Raises `OSError`.
        """
        size = into.numel()
        tail = size % ALIGNMENT
        if not self._direct or not size:
            return read_fully(self._fd, bytes_of(into), offset)
        if into.data_ptr() % ALIGNMENT:
            stored = scratch(size)
            got = self.read(stored, offset)
            into[:got].copy_(stored[:got])  # releases the GIL
            return got
        if tail:
            return self._read_with_spare(bytes_of(into), tail, offset)
        return read_fully(self._fd, bytes_of(into), offset)

    def _read_with_spare(self, into: memoryview, tail: int, offset: int) -> int:
        """Fill `into`, whose last page is none: that one is read elsewhere and its bytes are copied."""
        whole, spare = len(into) - tail, bytes_of(_held("spare", ALIGNMENT))
        got = os.preadv(self._fd, [into[:whole], spare] if whole else [spare], offset)
        if got < len(into):  # the file's end, or a signal
            got = read_fully(self._fd, into[:whole], offset)
            if got == whole:
                got += min(tail, read_fully(self._fd, spare, offset + whole))
        into[whole:] = spare[:tail]
        return min(got, len(into))

    def _first(self, size: int) -> bytes:
        """The file's first `size` bytes, or all it has."""
        start = scratch(size + -size % ALIGNMENT)
        return bytes(bytes_of(start)[: min(size, read_fully(self._fd, bytes_of(start), 0))])

    def _fall_back(self) -> None:
        """Go through the page cache after all."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._fd)
        self._fd, self._direct = fd, False


def aligned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised host tensor that begins at a multiple of 4 KiB, as O_DIRECT reads need."""
    size = dtype.itemsize
    for side in shape:
        size *= side
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size].view(dtype).view(tuple(shape))


def scratch(size: int) -> torch.Tensor:
    """`size` aligned bytes of this thread's, valid until it asks again."""
    return _held("scratch", size)[:size]


def _held(name: str, size: int) -> torch.Tensor:
    held: torch.Tensor | None = getattr(_HELD, name, None)
    if held is None or held.numel() < size:
        held = aligned_empty((size,), torch.uint8)
        setattr(_HELD, name, held)
    return held
