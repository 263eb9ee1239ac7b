"""A server process with two keys, a bystander, a prober of /livez, and readings of the process.

with target(tmp_path) as up:
    with Watch(up) as watch:
        attack(up.attacker())
    watch.assert_unharmed()
"""

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from ragkv.config import MIB
from tests.api import serving
from tests.api.whole import ask, documents, ingest, key, server

QUESTION = "What is the job of Kiralus?"
TIMEOUT_S = 300.0  # of a client: longer than any attack, so that a frozen server shows as a long answer, not an error
ANSWER_S = 10.0  # the longest a bystander may wait for an answer, on a machine that runs other tests too
LIVEZ_S = 3.0  # the same for /livez: parsing takes seconds of processor time
MORE_BYTES = 200 * MIB  # by which an attack may leave the server's memory larger ...
SETTLE_S = 30.0  # ... once what its last requests held is given back, which takes so long at most


@dataclass(frozen=True, slots=True)
class Target:
    """A ready server with two tenants; the bystander's has the example documents."""

    process: serving.Process
    attacker_headers: Mapping[str, str]
    bystander_headers: Mapping[str, str]
    home: Path

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    def attacker(self, timeout_s: float = TIMEOUT_S) -> httpx.Client:
        """A client with the attacker's key."""
        return self.process.client(timeout_s, headers=dict(self.attacker_headers))

    def bystander(self, timeout_s: float = TIMEOUT_S) -> httpx.Client:
        """A client with the bystander's key."""
        return self.process.client(timeout_s, headers=dict(self.bystander_headers))

    def rss_bytes(self) -> int:
        """Resident memory of the server's own process; its children are not counted."""
        return _status(self.pid, "VmRSS") * 1024

    def threads(self) -> int:
        """Threads of the server's own process."""
        return _status(self.pid, "Threads")

    def descriptors(self) -> int:
        """Open file descriptors of the server's own process."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def children(self) -> list[int]:
        """The ids of the server's child processes and of theirs: those that parse are the fork server's."""
        found, asked = list[int](), [self.pid]
        while asked:
            with contextlib.suppress(OSError):  # it has ended, or one of its threads has
                for task in Path(f"/proc/{asked.pop()}/task").iterdir():
                    asked += (new := list(map(int, (task / "children").read_text().split())))
                    found += new
        return found


def runs(pid: int) -> bool:
    """Whether there is such a process, and it is not waiting to be collected by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def bare_target(
    home: Path, environment: Mapping[str, str] | None = None, *flags: str, descriptors: int | None = None
) -> Iterator[Target]:
    """A server on the bundled reader, where the attacker has an empty collection. It starts faster than `target`."""
    attacker, bystander = key(home, "attacker"), key(home, "bystander")
    with server(home, environment, *flags, descriptors=descriptors) as process:
        with process.client(headers=attacker) as client:
            assert client.post("/v1/collections", json={"name": "c"}).status_code == 201
        yield Target(process, attacker, bystander, home)


@contextmanager
def target(
    home: Path, environment: Mapping[str, str] | None = None, *flags: str, descriptors: int | None = None
) -> Iterator[Target]:
    """A server on the bundled reader. `environment` holds its settings; `descriptors` is its limit of open files."""
    with bare_target(home, environment, *flags, descriptors=descriptors) as up:
        with up.bystander() as client:
            stored = ingest(client, documents())
            assert stored.status_code == 201, stored.text
            assert ask(client, QUESTION).status_code == 200
        yield up


@dataclass(slots=True)
class Responses:
    """How long requests took, and their statuses; 0 stands for a broken connection."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def add(self, status: int, seconds: float) -> None:
        self.seconds.append(seconds)
        self.statuses[status] += 1

    @property
    def longest(self) -> float:
        return max(self.seconds, default=0.0)

    def __str__(self) -> str:
        return f"{len(self.seconds)} responses {dict(self.statuses)}, longest {self.longest:.3f} s"


class Watch:
    """Asks as the bystander every `every_s`, and probes /livez twenty times a second, while the block runs."""

    def __init__(self, up: Target, every_s: float = 0.5) -> None:
        self._up, self._every_s = up, every_s
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask), threading.Thread(target=self._probe)]
        self.answers, self.livez = Responses(), Responses()
        self.wrong: list[str] = []  # answers unlike the bystander's first one
        self.rss_before = self.rss_after = 0

    def __enter__(self) -> Self:
        self.rss_before = self._up.rss_bytes()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        if self._up.process.popen.poll() is None:
            self.rss_after = self._settled_rss_bytes()

    def _settled_rss_bytes(self) -> int:
        """Resident memory once the server has given back what its last requests held: it does so when they end."""
        ends = time.monotonic() + SETTLE_S
        while (found := self._up.rss_bytes()) > self.rss_before + MORE_BYTES and time.monotonic() < ends:
            time.sleep(0.5)
        return found

    def assert_unharmed(self) -> None:
        """Assert what an attack must leave as it was."""
        assert set(self.answers.statuses) == {200} and self.answers.longest < ANSWER_S, f"the bystander: {self}"
        assert self.wrong == [], f"answers unlike the first one: {self.wrong[:3]}"
        assert set(self.livez.statuses) == {200} and self.livez.longest <= LIVEZ_S, f"/livez: {self}"
        grown = self.rss_after - self.rss_before
        assert grown <= MORE_BYTES, f"the server's memory grew by {grown / MIB:.0f} MiB"

    def __str__(self) -> str:
        return (
            f"bystander {self.answers}; livez {self.livez}; RSS {self.rss_before / MIB:.0f} to "
            f"{self.rss_after / MIB:.0f} MiB"
        )

    def _ask(self) -> None:
        first: str | None = None
        with self._up.bystander() as client:
            while not self._end.is_set():
                began = time.monotonic()
                status, text = _response(lambda: ask(client, QUESTION))
                self.answers.add(status, time.monotonic() - began)
                if status == 200:
                    first = text if first is None else first
                    if text != first:
                        self.wrong.append(text)
                self._end.wait(max(0.0, self._every_s - (time.monotonic() - began)))

    def _probe(self) -> None:
        while not self._end.is_set():
            began = time.monotonic()
            self.livez.add(livez_status(self._up.process.port), time.monotonic() - began)
            self._end.wait(0.05)


def at_once(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that run at the same time, each in its thread; a raised exception is its result."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(one) for one in work]
    return [future.exception() or future.result() for future in futures]


def wait_until(true: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Whether `true()` became true in time."""
    ends = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _response(call: Callable[[], httpx.Response]) -> tuple[int, str]:
    """Status and answer; status 0 if the connection broke."""
    try:
        response = call()
        return response.status_code, response.json().get("answer", "")
    except (httpx.HTTPError, ValueError):
        return 0, ""


def livez_status(port: int) -> int:
    """The status of /livez over a new connection; 0 if the connection broke."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/livez")
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _status(pid: int, name: str) -> int:
    """A number in /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)
