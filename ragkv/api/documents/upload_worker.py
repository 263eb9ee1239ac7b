"""What a process that parses one upload does: it limits itself, parses, and returns the documents.

It is forked from multiprocessing's fork server, which has this module loaded and nothing of the model: no torch, no web
framework. It inherits no open file of the server.
"""

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

from ragkv.retrieval import Document

from .upload_parsing import Upload, UploadError, parse_upload

with contextlib.suppress(ImportError):
    import pypdf  # noqa: F401 - an extra, loaded before the first upload so that it counts against no limit

NICENESS = 10  # Answers are computed first.
PR_SET_PDEATHSIG = 1  # The number of prctl's option that names the signal which the end of a parent sends.


def parse_alone(upload: Upload, body: bytes, cpu_s: int, memory_bytes: int) -> list[Document] | UploadError | None:
    """The documents of one upload, or why it is refused; `None` if the memory was not enough."""
    try:
        _limit_this_process(cpu_s, memory_bytes)
        return parse_upload(upload, body)
    except UploadError as error:
        return error
    except BaseException as error:
        # Libraries in Rust panic when no memory is left, which raises no `Exception`.
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            raise
        return None  # what was parsed is free then: to raise would keep it


def _virtual_bytes() -> int | None:
    """The size of this process's address space; `None` where the system is not Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


_IDLE_BYTES = _virtual_bytes()  # The size before a body is there: the fork server imports this module.


def _limit_this_process(cpu_s: int, memory_bytes: int) -> None:
    """No written files, no child processes, no environment, no log; so much CPU time and memory.

    It ends at the first signal, and with the fork server, which ends with the server: also if that was killed.
    """
    os.environ.clear()
    os.nice(NICENESS)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):  # libraries quote what they read
        os.dup2(nowhere, output)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    if _IDLE_BYTES is not None:
        limits[resource.RLIMIT_AS] = _IDLE_BYTES + memory_bytes
    # It ends by SIGXCPU, which says why, also if the server was killed meanwhile; at the second number by SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for kind, most in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
