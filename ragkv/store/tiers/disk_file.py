"""One entry file open for reading, through the page cache or past it.

Past it (O_DIRECT) memory, offset and length must be multiples of a page. Layers begin at one in the file, and what
follows a layer up to the next page is padding, so only the memory is in question: an aligned buffer is read into where
it is, its last part of a page by the way of a spare one in the same request, and any other by the way of this thread's
scratch memory. The head is read past the page cache too: through it, the kernel would read far ahead into the layers.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from ..record import ALIGNMENT, RecordHead, bytes_of, parse_head, read_fully, read_head

HUGE_PAGE = 2 * 1024**2  # bytes

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

    def head(self, key: str) -> RecordHead:
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

    def read(self, into: Sequence[torch.Tensor], offset: int) -> list[memoryview]:
        """Fill contiguous host tensors, alike in bytes, from `offset` on, each from the next multiple of a page.

        The bytes of those that were filled: fewer if the file ends. Releases the GIL. Raises `OSError`.
        """
        views = [bytes_of(tensor) for tensor in into]
        if self._direct and any(tensor.data_ptr() % ALIGNMENT for tensor in into):
            stored = self.read(scratch_pieces(len(into), len(views[0])), offset)
            for view, piece in zip(views, stored, strict=False):
                np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(piece, np.uint8))  # releases the GIL
            return views[: len(stored)]
        size = len(views[0])
        stride = size + -size % ALIGNMENT
        filled = 0
        while filled < len(views):
            start = offset + filled * stride
            if self._direct:
                got = self._read_direct(views[filled:], start)
            else:
                got = read_fully(self._fd, views[filled], start)
            if got < size and not (self._direct and self._finish(views[filled], start, got)):
                break
            filled += 1 + max(0, got - size) // stride
        return views[:filled]

    def _read_direct(self, into: Sequence[memoryview], offset: int) -> int:
        """One request for aligned memory and what is between it, whose last page, if it is none, is read elsewhere."""
        tail = len(into[0]) % ALIGNMENT
        if not tail:
            return os.preadv(self._fd, into, offset)
        whole = len(into[0]) - tail
        spares = [bytes_of(spare) for spare in scratch_pieces(len(into), ALIGNMENT, "spare")]
        vectors = [part for view, spare in zip(into, spares, strict=True) for part in (view[:whole], spare) if part]
        got = os.preadv(self._fd, vectors, offset)
        for view, spare in zip(into, spares, strict=True):
            view[whole:] = spare[:tail]
        return got

    def _finish(self, into: memoryview, offset: int, done: int) -> bool:
        """Read on where a request brought only `done` bytes, as on some file systems; whether the file has them all."""
        while done < len(into):
            whole = done - done % ALIGNMENT
            got = self._read_direct([into[whole:]], offset + whole)
            if whole + got <= done:
                return False
            done = whole + got
        return True

    def _first(self, size: int) -> bytes:
        """The file's first `size` bytes, or all it has."""
        start = bytes_of(scratch_pieces(1, size + -size % ALIGNMENT)[0])
        return bytes(start[: min(size, read_fully(self._fd, start, 0))])

    def _fall_back(self) -> None:
        """Go through the page cache after all."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._fd)
        self._fd, self._direct = fd, False


def aligned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A host tensor that begins at a multiple of 4 KiB, as O_DIRECT reads need; its values are anything.

    From 2 MiB on it lies in huge pages where the system gives them: a disk is told of every run of neighbouring pages
    apart, and fills memory scattered over the heap at less than half the speed (docs/log.md).
    """
    size = dtype.itemsize
    for side in shape:
        size *= side
    raw, aligned = (_mapped(size), HUGE_PAGE) if size >= HUGE_PAGE else (_heap(size), ALIGNMENT)
    start = -raw.data_ptr() % aligned
    return raw[start : start + size].view(dtype).view(tuple(shape))


def _heap(size: int) -> torch.Tensor:
    return torch.empty(size + ALIGNMENT, dtype=torch.uint8)


def _mapped(size: int) -> torch.Tensor:
    """A mapping of its own, unmapped with the tensor, in which `size` bytes fill whole huge pages."""
    memory = mmap.mmap(-1, size + -size % HUGE_PAGE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def scratch_pieces(count: int, size: int, name: str = "scratch") -> Sequence[torch.Tensor]:
    """`count` times `size` aligned bytes of this thread's, valid until it asks for `name` again."""
    stride = size + -size % ALIGNMENT
    held: torch.Tensor | None = getattr(_HELD, name, None)
    if held is None or held.numel() < count * stride:
        held = aligned_empty((count * stride,), torch.uint8)
        setattr(_HELD, name, held)
    return [piece[:size] for piece in torch.split(held[: count * stride], stride)]
