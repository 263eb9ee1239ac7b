"""Reading an open entry file through the page cache, or past it (O_DIRECT).

For a direct read, memory address, file offset and length must be multiples of a page (4 KiB). Layers begin at a page
in the file and are padded to a page, so only the memory matters. An aligned buffer is read directly; its last partial
page goes through a scratch page in the same request. Any other buffer is filled from scratch memory of the thread.
The head is read directly too: through the page cache, the kernel would read far ahead into the layers.
"""

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from ..key import EntryKey
from ..record import ALIGNMENT, RecordHead, bytes_of, parse_head, read_fully, read_head

HUGE_PAGE = 2 * 1024**2  # bytes

_SCRATCH = threading.local()  # each thread keeps scratch memory for the largest read it made


class EntryFile:
    """An open file. Its descriptor is closed with the last reference, so never under a read of another thread."""

    def __init__(self, fd: int, path: Path, direct: bool) -> None:
        self._fd, self._path = fd, path
        self.direct = direct  # reads go past the page cache, so the kernel does not read ahead

    @classmethod
    def open(cls, path: Path, direct: bool) -> Self:
        """Open `path`, for direct reads if asked and if the system supports them. Raises `OSError`."""
        flag = getattr(os, "O_DIRECT", None)
        if direct and flag is not None:
            with contextlib.suppress(OSError):  # an error of the file itself is raised by the second open
                return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag), path, True)
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, False)

    def __del__(self) -> None:
        os.close(self._fd)

    def head(self, key: EntryKey) -> RecordHead:
        """See `read_head`."""
        if not self.direct:
            return read_head(self._fd, key)
        try:
            return parse_head(key, self._first, os.fstat(self._fd).st_size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fall_back()  # the file system opens with O_DIRECT, but does not read with it
            return read_head(self._fd, key)

    def read(self, into: Sequence[torch.Tensor], offset: int) -> list[memoryview]:
        """Fill contiguous host tensors of equal size from `offset` on; each begins at the next page of the file.

        Returns the bytes of the tensors that were filled: fewer if the file ends. Releases the GIL. Raises `OSError`.
        """
        views = [bytes_of(tensor) for tensor in into]
        if self.direct and any(tensor.data_ptr() % ALIGNMENT for tensor in into):
            stored = self.read(scratch_pieces(len(into), len(views[0])), offset)
            for view, piece in zip(views, stored, strict=False):
                np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(piece, np.uint8))  # releases the GIL
            return views[: len(stored)]
        size = len(views[0])
        stride = _padded(size)
        filled = 0
        while filled < len(views):
            start = offset + filled * stride
            if self.direct:
                got = self._read_direct(views[filled:], start)
            else:
                got = read_fully(self._fd, views[filled], start)
            if got < size and not (self.direct and self._continue(views[filled], start, got)):
                break
            filled += 1 + max(0, got - size) // stride
        return views[:filled]

    def _read_direct(self, into: Sequence[memoryview], offset: int) -> int:
        """Fill aligned buffers with one request, each buffer's last partial page through a scratch page."""
        tail = len(into[0]) % ALIGNMENT
        if not tail:
            return os.preadv(self._fd, into, offset)
        whole = len(into[0]) - tail
        pages = [bytes_of(page) for page in scratch_pieces(len(into), ALIGNMENT, "last pages")]
        vectors = [part for view, page in zip(into, pages, strict=True) for part in (view[:whole], page) if part]
        got = os.preadv(self._fd, vectors, offset)
        for view, page in zip(into, pages, strict=True):
            view[whole:] = page[:tail]
        return got

    def _continue(self, into: memoryview, offset: int, done: int) -> bool:
        """Read on after a request that brought only `done` bytes, as some file systems do; whether `into` is full."""
        while done < len(into):
            whole = done - done % ALIGNMENT
            got = self._read_direct([into[whole:]], offset + whole)
            if whole + got <= done:
                return False
            done = whole + got
        return True

    def _first(self, size: int) -> bytes:
        """The file's first `size` bytes, or all if it has fewer."""
        start = bytes_of(scratch_pieces(1, _padded(size))[0])
        return bytes(start[: min(size, read_fully(self._fd, start, 0))])

    def _fall_back(self) -> None:
        """Read through the page cache from now on."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._fd)
        self._fd, self.direct = fd, False


def aligned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised host tensor whose address is a multiple of 4 KiB, as O_DIRECT reads need.

    From 2 MiB on, it asks the system for huge pages: the kernel describes every run of neighbouring pages to the disk
    separately, and the disk fills memory scattered over the heap at less than half the speed (docs/log.md).
    """
    size = dtype.itemsize * math.prod(shape)
    if size < HUGE_PAGE:
        raw, aligned = torch.empty(size + ALIGNMENT, dtype=torch.uint8), ALIGNMENT
    else:
        raw, aligned = _mapped(size), HUGE_PAGE
    start = -raw.data_ptr() % aligned
    return raw[start : start + size].view(dtype).view(tuple(shape))


def _mapped(size: int) -> torch.Tensor:
    """A memory mapping, unmapped with the tensor, in which `size` bytes can begin at a huge page."""
    memory = mmap.mmap(-1, size + -size % HUGE_PAGE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def scratch_pieces(count: int, size: int, name: str = "scratch") -> Sequence[torch.Tensor]:
    """`count` aligned buffers of `size` bytes, valid until this thread asks for the scratch memory `name` again."""
    stride = _padded(size)
    memory: torch.Tensor | None = getattr(_SCRATCH, name, None)
    if memory is None or memory.numel() < count * stride:
        memory = aligned_empty((count * stride,), torch.uint8)
        setattr(_SCRATCH, name, memory)
    return [piece[:size] for piece in torch.split(memory[: count * stride], stride)]


def _padded(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT
