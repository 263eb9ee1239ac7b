"""A Redis server for the replicas of one machine, started and ended with them, if the settings name no other.

It listens on a Unix socket in a directory of the data directory that only this user can enter, and on no port. Its
memory is bounded. Conversations are written to its directory once a minute and at the end; stored KV as well, so a
restart finds both.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.api import ServeConfig
from ragkv.config import GIB, RedisConfig
from ragkv.errors import ConfigError
from ragkv.runtime import Closing, make_private_folder
from ragkv.store.remote import redis_answers

log = logging.getLogger(__name__)

PROGRAMS = ("redis-server", "valkey-server")
START_S = 20.0
END_S = 60.0  # The server gets so long to write its data at the end.
TENANT_BYTES = GIB  # One tenant's entries take at most this much.
ALL_BYTES = 2 * GIB  # Above this size of the server entries are evicted, conversations never.
SOCKET_CHARS = 100  # The system's limit of a socket's path is 104 to 108.


class LocalRedis(Closing):
    """A server process."""

    def __init__(self, home: Path) -> None:
        """Start it, or use the one of another process with the same `home`. Raises `ConfigError` without a program."""
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise ConfigError(
                "Replicas share conversations over a Redis server. Install redis-server or valkey-server, and it is "
                "started for them; or set store.redis.url to a server of your own."
            )
        folder = (home / "redis").absolute()
        make_private_folder(folder)
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        socket = folder / "redis.sock"
        if len(str(socket)) > SOCKET_CHARS:
            self._sockets = tempfile.TemporaryDirectory(prefix="ragkv-redis-")  # mode 0700
            socket = Path(self._sockets.name) / "redis.sock"
        self.config = RedisConfig(url=f"unix://{socket}", max_bytes=TENANT_BYTES)
        self._command = [
            program, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(folder),
            "--pidfile", str(folder / "redis.pid"), "--save", "60 1", "--appendonly", "no",
            "--maxmemory", str(ALL_BYTES), "--maxmemory-policy", "volatile-lru",
            "--daemonize", "no", "--loglevel", "warning",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = FileLock(folder / ".lock", mode=0o600)
        with contextlib.suppress(Timeout):  # else another process runs the server
            self._lock.acquire(timeout=0)
            self._end_leftover(folder / "redis.pid")
            self._start()

    def restart_if_ended(self) -> None:
        """Start the server again if it ended."""
        if self._process is not None and self._process.poll() is not None:
            log.warning("The Redis server ended with status %d; it is started again.", self._process.returncode)
            self._start()

    def close(self) -> None:
        """End the server, which writes its data first. Twice is harmless."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._sockets is not None:
            self._sockets.cleanup()
        self._lock.release()

    def _end_leftover(self, pid_file: Path) -> None:
        """End a server that outlived its killed parent. Raises `ConfigError` if it does not end."""
        if not redis_answers(self.config):
            return
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        ends = time.monotonic() + END_S
        while redis_answers(self.config):
            if time.monotonic() > ends:
                raise ConfigError(f"An earlier Redis server still uses {self.config.url}; end it, or set another home.")
            time.sleep(0.05)

    def _start(self) -> None:
        # A session of its own: Ctrl-C in the terminal ends it with the replicas and not before them.
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        ends = time.monotonic() + START_S
        while not redis_answers(self.config):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
                raise ConfigError(
                    f"{self._command[0]} ended with status {self._process.returncode}; start it by hand to see why: "
                    f"{' '.join(self._command)}"
                )
            if time.monotonic() > ends:
                self.close()
                raise ConfigError(f"{self._command[0]} does not answer after {START_S:g} s; set store.redis.url.")


def with_redis(config: ServeConfig, redis: RedisConfig) -> ServeConfig:
    """The settings, with that server for all replicas."""
    return replace(config, engine=replace(config.engine, store=replace(config.engine.store, redis=redis)))
