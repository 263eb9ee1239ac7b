"""The lock of the one process that writes to a disk tier's directory, and who holds it.

This module loads no torch, so a command can see quickly that it must not write (`check_unlocked`).
"""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

import filelock

from ragkv.errors import StoreLockedError

PROBE_S = 0.3  # A writer waits so long for the lock, which `check_unlocked` holds for a moment.
_HOLDER = "writer.txt"


def check_unlocked(root: str | Path) -> None:
    """Raise `StoreLockedError` if a process writes to the directory now; costs no more
    than a look.
    """
    root = Path(root)
    if not (root / "writer.lock").exists():
        return
    lock = _lock_of(root)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise _locked_error(root) from None
    except OSError:  # what else is wrong is said when the directory is opened
        return
    lock.release()


def acquire(root: Path) -> filelock.BaseFileLock:
    """The lock, held. Raises `StoreLockedError` if another process has it, and `OSError`."""
    lock = _lock_of(root)
    try:
        lock.acquire(timeout=PROBE_S)
    except filelock.Timeout:
        raise _locked_error(root) from None
    # A file of its own: a process that tries to acquire the lock may truncate the lock file.
    holder = root / _HOLDER
    # needed for the message only: a store on a full disk must still open
    with contextlib.suppress(OSError):
        holder.touch(mode=0o600)
        holder.write_text(_this_process(), encoding="utf-8")
    return lock


def _lock_of(root: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(root / "writer.lock", timeout=0, mode=0o600, thread_local=False)


def _locked_error(root: Path) -> StoreLockedError:
    holder = _lock_holder(root)
    return StoreLockedError(
        f"The store directory {root} is written by {holder} already. Wait for it or stop it, "
        "choose another directory "
        "(--home on the command line), or open this one with read_only=True, as ask and search do.",
        holder,
    )


def _lock_holder(root: Path) -> str:
    """The process that has the lock, as it described itself."""
    try:
        known = (root / _HOLDER).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return "another process"
    if known.startswith(f"pid {os.getpid()} "):
        return "this very process"
    return f"another process ({known[:200]})" if known else "another process"


def _this_process() -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"pid {os.getpid()} on {socket.gethostname()}, {_command()}, since {since}"


def _command() -> str:
    """The program of this process; of `ragkv` also the command. Other arguments may be secret."""
    started = Path(sys.argv[0]) if sys.argv[0] not in ("", "-", "-c") else Path(sys.executable)
    name = started.parent.name if started.name == "__main__.py" else started.name
    return " ".join([name, *sys.argv[1:2]]) if name == "ragkv" else name
