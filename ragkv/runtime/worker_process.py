"""A process that answers one request at a time and can be killed at any moment, for work on bytes from strangers.

A request and its answer are byte strings over pipes, and nothing is unpickled: a parser that a file has taken over
cannot run code in the parent. Each request has a budget. The child limits its own CPU time and memory, and the parent
kills it when the time is over. The child inherits no secrets from the environment, and it can neither write files nor
start processes.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from .closing import Closing

Exhausted = Literal["wall_s", "cpu_s", "memory_bytes"]

_NUMBER = struct.Struct("<Q")
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_GROWN_BYTES = 128 << 20  # a child that grew by more is not used again
_START_S = 60.0  # until a new process is ready; it imports libraries
_DYING_S = 1.0  # from the end of its pipe to its exit status
_NICENESS = 10  # answers are computed first


@dataclass(frozen=True, slots=True)
class WorkBudget:
    """What one request may use."""

    wall_s: float
    cpu_s: float
    memory_bytes: int  # more than the idle process has
    answer_bytes: int


class WorkerEndedError(Exception):
    """The process ended before it answered. `exhausted` is the part of the budget that was used up, if that was why."""

    def __init__(self, exhausted: Exhausted | None, status: int | None) -> None:
        super().__init__(f"the worker process ended with status {status}; exhausted: {exhausted}")
        self.exhausted, self.status = exhausted, status


class WorkerStartError(Exception):
    """The process did not get ready for requests. No request is the reason."""


class WorkerProcess(Closing):
    """The parent's side. One thread calls; any thread may kill."""

    def __init__(self, module: str) -> None:
        """Start `python -m module`, which calls `answer_requests`. Raises `OSError` if the system starts no process."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        path = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries quote what they read
            env={**inherited, **single, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,  # Ctrl-C in a terminal is the parent's to handle
        )
        self._ready = self._timed_out = False

    def call(self, request: Sequence[bytes], budget: WorkBudget) -> list[bytes]:
        """The answer to a request. Blocks. Raises `WorkerStartError` and `WorkerEndedError`; then it is closed."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._wait_ready(self._popen.stdout)
        try:
            with self._killed_after(budget.wall_s):
                _write(self._popen.stdin, [json.dumps(asdict(budget)).encode(), *request])
                status, *answer = _read(self._popen.stdout, budget.answer_bytes)
        except (OSError, EOFError, ValueError):
            self._end()
            raise WorkerEndedError(self._exhausted(), self._popen.returncode) from None
        if status != b"ok" or self._timed_out:
            self.close()
        if status == b"memory":
            raise WorkerEndedError("memory_bytes", self._popen.returncode)
        return answer

    @property
    def ended(self) -> bool:
        """Whether it can answer no more requests."""
        return self._popen.poll() is not None

    def kill(self) -> None:
        """End the process now; a call that waits for it raises `WorkerEndedError`."""
        self._popen.kill()

    def close(self) -> None:
        """Kill the process and wait for its end, which takes no time."""
        self._popen.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            with contextlib.suppress(OSError):  # bytes that it did not read
                assert pipe is not None
                pipe.close()
        self._popen.wait()

    def _wait_ready(self, answers: IO[bytes]) -> None:
        if self._ready:
            return
        try:
            with self._killed_after(_START_S):
                _read(answers, _NUMBER.size)
        except (OSError, EOFError, ValueError):
            self._end()
            raise WorkerStartError(f"it ended with status {self._popen.returncode}") from None
        self._ready = True

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self._time_out)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _time_out(self) -> None:
        self._timed_out = True
        self._popen.kill()

    def _end(self) -> None:
        """Close the process, with its own exit status if it is about to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_DYING_S)
        self.close()

    def _exhausted(self) -> Exhausted | None:
        if self._timed_out:
            return "wall_s"
        # Libraries in Rust abort the process when they get no memory.
        of_signal: dict[int | None, Exhausted] = {-signal.SIGPROF: "cpu_s", -signal.SIGABRT: "memory_bytes"}
        return of_signal.get(self._popen.returncode)


def answer_requests(answer: Callable[[list[bytes]], Sequence[bytes]]) -> None:
    """The child's side: answer requests until the parent closes the pipe. `answer` may be interrupted at any point."""
    requests, answers = _own_pipes()
    _give_up_rights()
    idle_bytes = _peak_bytes()
    _write(answers, [b""])  # ready
    while True:
        try:
            budget, *request = _read(requests)
        except EOFError:
            return
        limits = WorkBudget(**json.loads(budget))
        try:
            with _limited(limits):
                answered = answer(request)
        except BaseException as error:
            # Libraries in Rust panic when no memory is left, which raises no `Exception`.
            if isinstance(error, Exception) and not isinstance(error, MemoryError):
                raise
            _write(answers, [b"memory"])
            return
        grown = _peak_bytes() - idle_bytes > _GROWN_BYTES
        _write(answers, [b"last" if grown else b"ok", *answered])
        if grown:
            return
        del answered, request


def _own_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The pipes from and to the parent. Whatever a library prints goes nowhere."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return requests, answers


def _give_up_rights() -> None:
    """No core files, no written files, no child processes, a lower priority."""
    os.nice(_NICENESS)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (0, 0))


@contextlib.contextmanager
def _limited(budget: WorkBudget) -> Iterator[None]:
    """Within the block the process is killed by SIGPROF after its CPU time, and its memory is limited (on Linux)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + budget.memory_bytes, hard))
    signal.setitimer(signal.ITIMER_PROF, budget.cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _write(pipe: IO[bytes], parts: Sequence[bytes]) -> None:
    pipe.write(_NUMBER.pack(len(parts)))
    for part in parts:
        pipe.write(_NUMBER.pack(len(part)))
        pipe.write(part)
    pipe.flush()


def _read(pipe: IO[bytes], most_bytes: int | None = None) -> list[bytes]:
    """The parts of a message. Raises `EOFError` at the end, and `ValueError` above `most_bytes`."""
    left = sys.maxsize if most_bytes is None else most_bytes
    parts = []
    for _ in range(_NUMBER.unpack(_exactly(pipe, _NUMBER.size))[0]):
        size = _NUMBER.unpack(_exactly(pipe, _NUMBER.size))[0]
        left -= size + _NUMBER.size
        if left < 0:
            raise ValueError(f"a message of more than {most_bytes} bytes")
        parts.append(_exactly(pipe, size))
    return parts


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
