"""Servers in their own processes, which tests can signal and kill. Run as a module, it serves the
small app.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]


class Process:
    """A server process that listens."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self.popen = popen
        self.lines: list[dict[str, Any]] = []  # of its log, parsed
        self._seen: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.port: int = self.wait_for(lambda line: line["event"] == "listening")["port"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, timeout_s: float = 60.0, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False, **more)

    def wait_for(
        self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = 300.0
    ) -> dict[str, Any]:
        """Wait for the next log line for which `wanted` is true."""
        while True:
            line = self._seen.get(timeout=timeout_s)
            if wanted(line):
                return line
            assert line.get("event") != "EOF", f"the server ended: {self.lines}"

    def take_lines(self) -> list[dict[str, Any]]:
        """The lines of its log since the last call; they are forgotten."""
        lines = self.lines[:]
        del self.lines[: len(lines)]
        with contextlib.suppress(queue.Empty):
            while True:
                self._seen.get_nowait()
        return lines

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until it accepts requests."""
        ends = time.monotonic() + timeout_s
        with self.client() as client:
            while (response := client.get("/readyz")).status_code != 200:
                assert self.popen.poll() is None and time.monotonic() < ends, response.text
                time.sleep(0.05)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for its end; returns the exit status."""
        return self.popen.wait(timeout_s)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for text in self.popen.stderr:
            try:
                line = json.loads(text)
            except ValueError:
                line = {"event": "", "text": text}
            self.lines.append(line)
            self._seen.put(line)
        self._seen.put({"event": "EOF"})


@contextmanager
def process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Start a server by a command that logs JSON; kill it at the end if it still runs."""
    inherited = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAGKV_SERVE__LOG__FORMAT": "json",
        **(environment or {}),
    }
    popen = subprocess.Popen(command, env=inherited, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield Process(popen)
    finally:
        with contextlib.suppress(ProcessLookupError):
            popen.send_signal(signal.SIGKILL)
        popen.wait(30)
        assert popen.stderr is not None
        popen.stderr.close()


def small(home: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Serve the small app in its own process."""
    return process([sys.executable, "-m", "tests.api.serving", str(home)], environment)


def main() -> None:
    from ragkv.api.server import serve
    from ragkv.api.settings import ServeConfig

    from .small_app import small_app

    config = ServeConfig.gather(flags={"home": sys.argv[1], "serve": {"port": 0}})
    app = small_app(config)
    serve(app, config)


if __name__ == "__main__":
    main()
