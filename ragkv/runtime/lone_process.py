"""Works on untrusted files and texts in a process that can be ended, such as reading a file or
splitting a text.

The process is forked from multiprocessing's fork server, which knows no model. It bounds its own
time and memory before each piece of work. It can neither write files nor start processes, forgets
the environment, and ends with the process that started it. If work exceeds a bound, its process is
killed, and the next work gets another process.

The thread that waits for an answer also reads it. A second thread would answer a future that is
cancelled in the same moment when a client leaves, and end with a traceback.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

from ragkv.errors import RagKVError

from .lifetime import Closing
from .waiting import Check, no_check

T = TypeVar("T")
Bound = Literal["wall_s", "cpu_s", "memory_bytes"]

POLL_S = 0.05  # Who waits for a process looks so often whether it should go on.
PR_SET_PDEATHSIG = 1  # The option of prctl that names the signal which a parent's end sends.
# How a process ends that the system killed for its processor time, or a library in Rust because it
# got no memory.
_ENDS: dict[int, Bound] = {-signal.SIGXCPU: "cpu_s", -signal.SIGABRT: "memory_bytes"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one piece of work may take."""

    wall_s: float
    memory_bytes: int  # more than the process has before; on Linux
    cpu_s: int | None = None  # seconds of processor time; None: as much as `wall_s` has


class LoneProcessError(Exception):
    """Work that gave no answer."""

    def __init__(self, reason: str, bound: Bound | None = None) -> None:
        """`reason` quotes nothing of what was worked on; `bound` is the bound that was exceeded."""
        super().__init__(reason, bound)
        self.reason = reason
        self.bound = bound


class NotStartedError(Exception):
    """The system starts no process now."""


class LoneProcess(Closing):
    """A process that does one piece of work after another. It starts with the first. Not
    thread-safe.
    """

    def __init__(self, name: str, preload: Sequence[str] = (), niceness: int = 0) -> None:
        """The fork server imports the modules `preload` once, before its first process. Work stands
        back behind that of others by `niceness`.
        """
        self._name = name
        self._niceness = niceness
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *preload])
        self._running: tuple[ForkServerProcess, Connection] | None = None

    def run(
        self,
        bounds: Bounds,
        work: Callable[..., T],
        *arguments: object,
        check: Check = no_check,
    ) -> T:
        """What `work` returns there within `bounds`. Blocks.

        Raises the `RagKVError` that `work` raises, `LoneProcessError`, `NotStartedError`, and what
        `check` raises; all but the first end the process.
        """
        ends = time.monotonic() + bounds.wall_s
        process, channel = self._started()
        try:
            channel.send((work, arguments, bounds))
            while not channel.poll(POLL_S):
                check()
                if time.monotonic() > ends:
                    raise LoneProcessError("it took too long", "wall_s")
            answer: Any = channel.recv()
            if isinstance(answer, LoneProcessError):
                raise answer
        except (EOFError, OSError):  # it ended before it answered, or while it did
            process.join()
            status = process.exitcode or 0
            self.close()
            raise LoneProcessError(f"it ended with {status}", _ENDS.get(status)) from None
        except BaseException:
            self.close()
            raise
        if isinstance(answer, RagKVError):
            raise answer
        (found,) = answer
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        if self._running is not None:
            process, channel = self._running
            self._running = None
            process.kill()
            process.join()
            channel.close()

    def _started(self) -> tuple[ForkServerProcess, Connection]:
        if self._running is not None and self._running[0].is_alive():
            return self._running
        self.close()
        channel, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._niceness), name=self._name, daemon=True
        )
        try:
            with theirs:
                process.start()
        except (OSError, EOFError) as error:
            channel.close()
            raise NotStartedError(str(error)) from error
        self._running = process, channel
        return self._running


def _serve(channel: Connection, niceness: int) -> None:
    """Work until nobody asks any more."""
    os.nice(niceness)
    _give_up_rights()
    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.send(_answer(channel.recv_bytes()))


def _answer(request: bytes) -> object:
    """What the requested work returns, alone in a tuple, or its error. An error that is not ours
    goes by its name: what it says may quote what was worked on.
    """
    try:
        work, arguments, bounds = pickle.loads(request)
        _bound(bounds)
        return (work(*arguments),)
    except RagKVError as error:
        return error
    except MemoryError:
        return LoneProcessError("no memory was left", "memory_bytes")
    except Exception as error:
        return LoneProcessError(type(error).__name__)
    except BaseException:  # libraries in Rust panic when no memory is left
        return LoneProcessError("no memory was left", "memory_bytes")


def _give_up_rights() -> None:
    """No output, because libraries quote what they read; no files, processes and environment. The
    first signal ends this process, and so does the end of the fork server.
    """
    os.environ.clear()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        os.dup2(nowhere, output)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (0, 0))


def _bound(bounds: Bounds) -> None:
    """Bound what this process takes from now on; what it works on is in memory already."""
    limits: dict[int, int] = {}
    if bounds.cpu_s is not None:  # SIGXCPU says why it ends
        used = resource.getrusage(resource.RUSAGE_SELF)
        limits[resource.RLIMIT_CPU] = int(used.ru_utime + used.ru_stime) + bounds.cpu_s
    with contextlib.suppress(OSError):  # Linux only
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + bounds.memory_bytes
    for kind, most in limits.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
