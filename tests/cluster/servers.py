"""Real servers for tests: the system's Redis, and an S3-compatible one from moto; each is a process
on loopback.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from ragkv.runtime import Closing

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 120.0  # importing moto takes long on a busy machine


def free_port() -> int:
    """A loopback port that is free now, and that the system gives to nobody who asks for
    any port.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)  # Linux gives those from 32,768 on
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


class Server(Closing):
    """A process that listens on a port; when it is started again it listens on the same port."""

    def __init__(self, command: list[str], port: int) -> None:
        self.command = command
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it listens."""
        self._process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (
                f"{self.command[0]} ended with {self._process.returncode}"
            )
            with socket.socket() as probe:
                if probe.connect_ex((LOOPBACK, self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{self.command[0]} does not listen after {START_TIMEOUT_S} s")

    def pause(self) -> None:
        """Stop the process: it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()


class RedisServer(Server):
    """A Redis server without persistence: after a restart it is empty."""

    def __init__(self, *options: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("there is neither redis-server nor valkey-server here")
        port = free_port()
        self.folder = tempfile.mkdtemp()
        self.socket = str(Path(self.folder) / "redis.sock")
        here = [
            "--bind",
            LOOPBACK,
            "--port",
            str(port),
            "--unixsocket",
            self.socket,
            "--dir",
            self.folder,
        ]
        super().__init__([program, *here, "--save", "", "--appendonly", "no", *options], port)

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def close(self) -> None:
        """Kill the server and delete its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class S3Server(Server):
    """moto's server with one bucket; after a restart the bucket is empty."""

    BUCKET = "entries"

    def __init__(self) -> None:
        pytest.importorskip("moto.server", reason="moto[server] is not installed")
        port = free_port()
        super().__init__([sys.executable, "-c", _MOTO, str(port)], port)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Start the process, and make the bucket as an administrator would."""
        super().start()
        request = urllib.request.Request(f"{self.url}/{self.BUCKET}", method="PUT", data=b"")
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
            assert answer.status == 200


_MOTO = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_REGION": "us-east-1",
}


def with_credentials() -> None:
    """Set credentials in the environment, for the whole session; moto takes any."""
    for name, value in CREDENTIALS.items():
        os.environ.setdefault(name, value)
