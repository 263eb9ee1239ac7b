"""SIGKILL under load, then a restart: no wrong answer, conversations continue, KV is found. SIGTERM loses nothing."""

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.api import serving
from tests.api.helpers import questions
from tests.api.whole import ask, assert_goes_on, documents, ingest, needs_reader, server, turn

pytestmark = [needs_reader, pytest.mark.enable_socket, pytest.mark.timeout(600)]
TALKERS, ASKERS = 3, 4


class Load:
    """Clients that ask, talk and ingest until the server ends. What the server acknowledged must hold afterwards."""

    def __init__(self, up: serving.Process, solo: dict[str, str], turns: Counter[str], stored: set[str]) -> None:
        self._up, self._solo = up, solo
        self.turns, self.stored = turns, stored  # acknowledged: turns by conversation, documents
        self.wrong: list[str] = []
        self._answered = 0
        self._stop = threading.Event()
        jobs = [self._ask] * ASKERS + [self._talk] * TALKERS + [self._ingest]
        self._threads = [threading.Thread(target=self._run, args=[job, n]) for n, job in enumerate(jobs)]
        for thread in self._threads:
            thread.start()
        ends = time.monotonic() + 60
        while self._answered < 10 and time.monotonic() < ends:
            time.sleep(0.01)

    def end(self) -> None:
        """Stop the clients and wait for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()
        assert self._answered > 0

    def _run(self, job: Callable[[httpx.Client, str], None], number: int) -> None:
        with self._up.client() as client, contextlib.suppress(httpx.TransportError, httpx.StreamError):
            while not self._stop.is_set():
                job(client, f"talk-{number}")

    def _said(self, response: httpx.Response, expected: int) -> bool:
        if response.status_code == expected:
            self._answered += 1
            return True
        if response.status_code != 503 or "retry-after" not in response.headers:
            self.wrong.append(f"{response.status_code} {response.text}")
        time.sleep(0.05)
        return False

    def _ask(self, client: httpx.Client, _: str) -> None:
        question = random.choice(list(self._solo))
        response = ask(client, question)
        if self._said(response, 200) and response.json()["answer"] != self._solo[question]:
            self.wrong.append(f"{question}: {response.json()['answer']!r}, not {self._solo[question]!r}")

    def _talk(self, client: httpx.Client, name: str) -> None:
        if self._said(turn(client, name, f"And what of number {self.turns[name]}?"), 200):
            self.turns[name] += 1

    def _ingest(self, client: httpx.Client, _: str) -> None:
        name = f"d{len(self.stored)}-{random.random()}"
        body = {"documents": [{"id": name, "text": f"The color of {name} is teal."}]}
        if self._said(client.post("/v1/collections/more/documents", json=body), 201):
            self.stored.add(name)


def _prepared(up: serving.Process) -> dict[str, str]:
    """Store the documents; the answer to each question without other load."""
    with up.client() as client:
        ingest(client, documents())
        assert client.post("/v1/collections", json={"name": "more"}).status_code == 201
        return {one["question"]: ask(client, one["question"]).json()["answer"] for one in questions()[:8]}


def _check(up: serving.Process, solo: dict[str, str], load: Load) -> None:
    """Assert that everything acknowledged before the end holds after it.

    A conversation may have one turn more: its answer was on disk and not sent yet.
    """
    assert load.wrong == []
    with up.client() as client:
        for question, expected in solo.items():
            found = ask(client, question).json()
            assert found["answer"] == expected
            assert found["reuse"]["missed_chunks"] == 0, "a stored entry was not found"
        for name, acknowledged in load.turns.items():
            shown = client.get(f"/v1/sessions/{name}")
            kept = shown.json()["turns"] if shown.status_code == 200 else 0
            assert acknowledged <= kept <= acknowledged + 1, name
            if kept:
                assert_goes_on(client, name)
            load.turns[name] = kept
        held = client.get("/v1/collections/more/documents", params={"limit": 1000}).json()
        assert load.stored <= {one["id"] for one in held["data"]}
        for name in list(load.stored)[:3]:
            assert name in client.get(f"/v1/collections/more/documents/{name}").json()["text"]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_kills_under_load_lose_no_acknowledged_answer_or_conversation(tmp_path: Path, kills: int) -> None:
    turns, stored = Counter[str](), set[str]()
    with server(tmp_path) as up:
        solo = _prepared(up)
    for _ in range(kills):
        with server(tmp_path) as up:
            load = Load(up, solo, turns, stored)
            time.sleep(random.random())
            up.signal(signal.SIGKILL)
            assert up.ended() == -signal.SIGKILL
            load.end()
        with server(tmp_path) as up:
            _check(up, solo, load)


def test_on_sigterm_running_answers_finish_and_every_turn_is_stored(tmp_path: Path) -> None:
    with server(tmp_path) as up:
        solo = _prepared(up)
        load = Load(up, solo, Counter(), set())
        up.signal(signal.SIGTERM)
        assert up.ended() == 0
        load.end()
        assert next(line for line in up.lines if line["event"] == "drained")["cut"] == 0
        failed = [line for line in up.lines if line.get("status", 0) >= 500]
        assert [line for line in failed if line["route"] not in ("none", "/readyz")] == []
    with server(tmp_path) as up:
        _check(up, solo, load)
