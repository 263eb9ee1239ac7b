"""Real servers for tests: Redis from the system, an S3-compatible one from moto; each a process on loopback."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

LOOPBACK = "127.0.0.1"
PATIENCE_S = 120.0  # importing moto takes long where everything does


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


class Server:
    """A process that listens on a port; started again it listens on the same."""

    def __init__(self, command: list[str], port: int) -> None:
        self.command, self.port = command, port
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            assert self._process.poll() is None, f"{self.command[0]} ended with {self._process.returncode}"
            with socket.socket() as probe:
                if probe.connect_ex((LOOPBACK, self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{self.command[0]} does not listen after {PATIENCE_S} s")

    def kill(self) -> None:
        """As a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class RedisServer(Server):
    """Holds everything in memory, so that a restart finds nothing."""

    def __init__(self, *options: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("there is neither redis-server nor valkey-server here")
        port = free_port()
        self.folder = tempfile.mkdtemp()
        self.socket = str(Path(self.folder) / "redis.sock")
        here = ["--bind", LOOPBACK, "--port", str(port), "--unixsocket", self.socket, "--dir", self.folder]
        super().__init__([program, *here, "--save", "", "--appendonly", "no", *options], port)

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def kill(self) -> None:
        super().kill()

    def remove(self) -> None:
        """For good."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class S3Server(Server):
    """moto's server, with one bucket."""

    BUCKET = "entries"

    def __init__(self) -> None:
        pytest.importorskip("moto.server", reason="moto[server] is not installed")
        port = free_port()
        super().__init__([sys.executable, "-c", _MOTO, str(port)], port)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        super().start()
        self.make_bucket()

    def make_bucket(self) -> None:
        """As an administrator would."""
        import urllib.request

        request = urllib.request.Request(f"{self.url}/{self.BUCKET}", method="PUT", data=b"")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert answer.status == 200


_MOTO = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}


def with_credentials() -> None:
    """What moto takes: anything. Left in the environment for the session."""
    for name, value in CREDENTIALS.items():
        os.environ.setdefault(name, value)
