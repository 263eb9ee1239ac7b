"""The lock of the one process that writes to a store directory, and who that process is.

This module loads neither torch nor the store, so a command can see quickly that it must not write.
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import filelock

from ragkv.errors import StoreLockedError

PROBE_S = 0.3  # A writer waits so long for the lock, which `check_unlocked` holds for a moment.


def acquire(root: Path) -> filelock.BaseFileLock:
    """The lock, held. Raises `StoreLockedError` if another process has it, and `OSError`."""
    lock = _lock_of(root)
    try:
        lock.acquire(timeout=PROBE_S)
    except filelock.Timeout:
        raise _locked_error(root) from None
    # A file of its own: a process that tries to acquire the lock may truncate the lock file.
    holder = root / "writer.json"
    with contextlib.suppress(OSError):  # needed for the message only: a store on a full disk must still open
        holder.touch(mode=0o600)
        known = {"pid": os.getpid(), "host": socket.gethostname(), "command": _command(), "since": time.time()}
        holder.write_text(json.dumps(known), encoding="utf-8")
    return lock


def check_unlocked(root: str | Path) -> None:
    """Raise `StoreLockedError` if a process writes to the directory now; costs no more than a look."""
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


def _lock_of(root: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(root / "writer.lock", timeout=0, mode=0o600, thread_local=False)


def _locked_error(root: Path) -> StoreLockedError:
    holder = _lock_holder(root)
    return StoreLockedError(
        f"The store directory {root} is written by {holder} already. Wait for it or stop it, choose another directory "
        "(--home on the command line), or open this one with read_only=True, as ask, search, explain and stats do.",
        holder,
    )


def _lock_holder(root: Path) -> str:
    """The process that has the lock, as it described itself."""
    try:
        known = json.loads((root / "writer.json").read_text(encoding="utf-8"))
        pid, host, command, since = int(known["pid"]), known["host"], known.get("command"), known.get("since")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "another process"
    if pid == os.getpid():
        return "this very process"
    parts = [f"pid {pid} on {host}"]
    if isinstance(command, str):
        parts.append(command)
    if isinstance(since, float):
        parts.append(f"since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}")
    return f"another process ({', '.join(parts)})"


def _command() -> str:
    """The program of this process; of `ragkv` also the command. Other arguments may be secret."""
    started = Path(sys.argv[0]) if sys.argv[0] not in ("", "-", "-c") else Path(sys.executable)
    name = started.parent.name if started.name == "__main__.py" else started.name
    return " ".join([name, *sys.argv[1:2]]) if name == "ragkv" else name
