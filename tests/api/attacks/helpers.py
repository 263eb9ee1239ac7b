"""A server process with two keys, a bystander, a prober of /livez, and readings of the process."""

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import numpy as np
import psutil

from ragkv.config import MIB
from tests.api import serving
from tests.api.whole import ask, documents, ingest, key, server

QUESTION = "What is the job of Kiralus?"
# of a client: longer than any attack, so that a frozen server shows as a long answer, not an error
TIMEOUT_S = 300.0
# the longest a bystander may wait for an answer, on a machine that runs other tests too
ANSWER_S = 10.0
LIVEZ_S = 3.0  # the same for /livez: parsing takes seconds of processor time
# by which an attack may leave the server's memory larger ...
MORE_BYTES = 200 * MIB
MORE_SHARE = 0.2
SETTLE_S = 30.0  # ... once what its last requests held is given back, which takes so long at most


@dataclass(frozen=True, slots=True)
class Target:
    """A ready server with two tenants; the bystander's has the example documents."""

    process: serving.Process
    attacker_headers: Mapping[str, str]
    bystander_headers: Mapping[str, str]
    port: int  # the server's, or nginx's in front of it

    @property
    def system(self) -> psutil.Process:
        """The server's own process as the system sees it."""
        return psutil.Process(self.process.popen.pid)

    def client(self, headers: Mapping[str, str]) -> httpx.Client:
        url = f"http://127.0.0.1:{self.port}"
        return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def bystander(self) -> httpx.Client:
        """A client with the bystander's key."""
        return self.client(self.bystander_headers)

    def cpu_s(self) -> float:
        """Seconds of processor time that the server and its children have used, also those that
        have ended.
        """
        used = 0.0
        for one in (self.system, *self.children()):
            with contextlib.suppress(psutil.NoSuchProcess):
                used += sum(one.cpu_times()[:4])
        return used

    def children(self) -> list[psutil.Process]:
        """The server's child processes and theirs: those that parse are the fork server's."""
        return self.system.children(recursive=True)


def runs(process: psutil.Process) -> bool:
    """Whether the process is there, and not waiting to be collected by its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def target(
    home: Path, environment: Mapping[str, str] | None = None, *flags: str
) -> Iterator[Target]:
    """A server on the small reader. `environment` holds its settings."""
    attacker = key(home, "attacker")
    bystander = key(home, "bystander")
    with server(home, environment, *flags) as process:
        up = Target(process, attacker, bystander, process.port)
        with up.client(attacker) as client:
            assert client.post("/v1/collections", json={"name": "c"}).status_code == 201
        with up.bystander() as client:
            assert ingest(client, documents()).status_code == 201
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
        p50, p99 = np.quantile(self.seconds or [0.0], (0.5, 0.99))
        return (
            f"{len(self.seconds)} responses {dict(self.statuses)}, P50 {p50:.3f} s, P99 {p99:.3f} s"
        )


class Watch:
    """While the block runs, asks and searches as the bystander, and probes /livez, again
    and again.
    """

    def __init__(self, up: Target) -> None:
        self._up = up
        self._end = threading.Event()
        self.answers = Responses()
        self.searches = Responses()
        self.livez = Responses()
        self._first: str | None = None  # the bystander's first answer
        self.wrong: list[str] = []  # answers unlike it
        self.rss_before = self.rss_after = 0
        works = (
            (self._ask, self.answers, 0.5),
            (self._search, self.searches, 0.2),
            (self._probe, self.livez, 0.05),
        )
        self._threads = [threading.Thread(target=self._again, args=work) for work in works]

    def __enter__(self) -> Self:
        self.rss_before = self._up.system.memory_info().rss
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
        """Resident memory once the server has given back what its last requests held: it does so
        when they end.
        """
        ends = time.monotonic() + SETTLE_S
        most = self.rss_before + self._more_bytes
        while (found := self._up.system.memory_info().rss) > most and time.monotonic() < ends:
            time.sleep(0.5)
        return found

    @property
    def _more_bytes(self) -> float:
        return max(MORE_BYTES, MORE_SHARE * self.rss_before)

    def assert_unharmed(self) -> None:
        """Assert what an attack must leave as it was."""
        for one in (self.answers, self.searches):
            assert set(one.statuses) == {200} and one.longest < ANSWER_S, f"the bystander: {self}"
        assert self.wrong == [], f"answers unlike the first one: {self.wrong[:3]}"
        assert set(self.livez.statuses) == {200} and self.livez.longest <= LIVEZ_S, (
            f"/livez: {self}"
        )
        grown = self.rss_after - self.rss_before
        assert grown <= self._more_bytes, f"the server's memory grew by {grown / MIB:.0f} MiB"

    def __str__(self) -> str:
        memory = f"RSS {self.rss_before / MIB:.0f} to {self.rss_after / MIB:.0f} MiB"
        return f"ask {self.answers}; search {self.searches}; livez {self.livez}; {memory}"

    def _again(
        self, act: Callable[[httpx.Client], int], responses: Responses, every_s: float
    ) -> None:
        with self._up.bystander() as client:
            while not self._end.is_set():
                began = time.monotonic()
                try:
                    status = act(client)
                except (httpx.HTTPError, ValueError):
                    status = 0  # the connection broke
                took = time.monotonic() - began
                responses.add(status, took)
                self._end.wait(max(0.0, every_s - took))

    def _ask(self, client: httpx.Client) -> int:
        response = ask(client, QUESTION)
        answer = response.json().get("answer", "")
        if response.status_code == 200:
            self._first = answer if self._first is None else self._first
            self.wrong += [answer] if answer != self._first else []
        return response.status_code

    def _search(self, client: httpx.Client) -> int:
        return client.post("/v1/collections/c/search", json={"query": QUESTION, "k": 5}).status_code

    def _probe(self, _: httpx.Client) -> int:
        return livez_status(self._up.port)


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
