"""Work for processes that can be ended. They import this file, so it does nothing else."""

import os
import resource
import signal

from ragkv.errors import MissingExtraError


def endless(*_: object) -> None:
    while True:
        pass


def large(*_: object) -> int:
    return len(bytes(3 << 30))


def refused(*_: object) -> None:
    raise MissingExtraError("mammoth", "office", "Reading a file")


def failing(text: str) -> None:
    raise ValueError(f"what it says quotes {text}")


def dying(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def panicking(*_: object) -> None:
    raise BaseException("a library in Rust")


def own_id() -> int:
    return os.getpid()


def rights() -> tuple[int, int, int, bool]:
    """What it may write, whether it may begin processes, its environment's size, and whether its
    output goes nowhere.
    """
    written = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    begun = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return written, begun, len(os.environ), os.path.sameopenfile(1, os.open(os.devnull, os.O_RDWR))
