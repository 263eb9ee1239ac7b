"""The file in a home that says where its server listens, so that a command can ask the server
instead; and which addresses mean this machine.

The file may be left behind by a server that was killed. `load` checks that its process lives on
this machine; the caller must still check that the process that answers names itself as `replica`.
"""

import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import make_private_folder, read_own, replace_file
from .setting_values import build

NAME = "server.json"  # the file in a home
# /readyz gives `LOADING` as the reason until questions are answered.
LOADING = "The model is being loaded."


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens, and how to know it again."""

    host: str  # an address of the loopback interface
    port: int
    model: str  # as the server's settings name it
    replica: str  # the word by which each of its responses names the process
    pid: int
    machine: str  # the host name of its machine

    @classmethod
    def of_this_process(cls, host: str, port: int, model: str, replica: str) -> "ServerAddress":
        return cls(host, port, model, replica, os.getpid(), socket.gethostname())

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, can only mean this machine."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@contextmanager
def announced(home: Path, address: ServerAddress) -> Iterator[None]:
    """Keep the file of `address` in `home` while the server runs. Raises `OSError` if it cannot be
    written.
    """
    make_private_folder(home)
    replace_file(home / NAME, json.dumps(dataclasses.asdict(address)).encode())
    try:
        yield
    finally:
        if _read(home) == address:
            with contextlib.suppress(OSError):
                (home / NAME).unlink()


def load(home: Path) -> ServerAddress | None:
    """The address of the server of `home`; `None` if it has none, or one on another machine, or a
    dead one.
    """
    address = _read(home)
    if address is None or address.machine != socket.gethostname() or not is_loopback(address.host):
        return None
    try:
        os.kill(address.pid, 0)
    except OSError:  # it has ended, or the process of that number is another user's
        return None
    return address


def _read(home: Path) -> ServerAddress | None:
    try:
        return read_own(home / NAME, _checked)
    except OSError:
        return None


def _checked(values: Any) -> ServerAddress:
    address: ServerAddress = build(ServerAddress, values)
    if not 0 < address.pid < 1 << 31:
        raise ValueError(f"no process has the number {address.pid}")
    return address
