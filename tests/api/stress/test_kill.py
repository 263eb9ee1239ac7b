"""SIGKILL under load, then a restart: no wrong answer, conversations continue, KV is found. SIGTERM loses nothing.

The full number of kills: `pytest tests/api/stress -m slow -s`.
"""

import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.api import serving
from tests.api.helpers import questions
from tests.api.whole import ask, assert_goes_on, documents, ingest, needs_reader, server, turn

pytestmark = [needs_reader, pytest.mark.enable_socket, pytest.mark.timeout(600)]
TALKERS, ASKERS = 3, 4
GONE = (httpx.TransportError, httpx.StreamError)


class Load:
    """Clients that ask, talk and ingest until the server ends. What the server acknowledged must hold afterwards."""

    def __init__(self, up: serving.Process, solo: dict[str, str], turns: Counter[str], stored: set[str]) -> None:
        self._up, self._solo = up, solo
        self.turns, self.stored = turns, stored  # acknowledged: turns by conversation, documents
        self.begun = Counter(turns)
        self.wrong: list[str] = []
        self.answered = self.refused = 0
        self._stop = threading.Event()
        jobs = [self._ask] * ASKERS + [self._talk] * TALKERS + [self._ingest]
        self._threads = [threading.Thread(target=job, args=[n]) for n, job in enumerate(jobs)]
        for thread in self._threads:
            thread.start()

    def wait_for_answers(self, answers: int = 10) -> None:
        """Wait until the clients got some answers."""
        ends = time.monotonic() + 60
        while self.answered < answers and time.monotonic() < ends:
            time.sleep(0.01)

    def end(self) -> None:
        """Stop the clients and wait for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _said(self, response: httpx.Response, expected: int) -> bool:
        if response.status_code == expected:
            self.answered += 1
            return True
        self.refused += response.status_code == 503
        if response.status_code != 503 or "retry-after" not in response.headers:
            self.wrong.append(f"{response.status_code} {response.text}")
        else:
            time.sleep(0.05)
        return False

    def _ask(self, number: int) -> None:
        choose = random.Random(number)
        with self._up.client() as client:
            while not self._stop.is_set():
                question = choose.choice(list(self._solo))
                try:
                    response = ask(client, question)
                except GONE:
                    return
                if self._said(response, 200) and response.json()["answer"] != self._solo[question]:
                    self.wrong.append(f"{question}: {response.json()['answer']!r}, not {self._solo[question]!r}")

    def _talk(self, number: int) -> None:
        name = f"talk-{number}"
        with self._up.client() as client:
            while not self._stop.is_set():
                self.begun[name] = self.turns[name] + 1
                try:
                    response = turn(client, name, f"And what of number {self.turns[name]}?")
                except GONE:
                    return
                if self._said(response, 200):
                    self.turns[name] += 1

    def _ingest(self, number: int) -> None:
        with self._up.client() as client:
            while not self._stop.is_set():
                name = f"d{len(self.stored)}-{random.random()}"
                try:
                    response = ingest(client, [{"id": name, "text": f"The color of {name} is teal."}], name="more")
                except (*GONE, AssertionError):  # the collection could not be created
                    return
                if self._said(response, 201):
                    self.stored.add(name)


def _solo(client: httpx.Client) -> dict[str, str]:
    """The answer to each question without other load."""
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
            load.turns[name] = client.get(f"/v1/sessions/{name}").json()["turns"] if kept else 0
        held = client.get("/v1/collections/more/documents", params={"limit": 1000}).json()
        assert load.stored <= {one["id"] for one in held.get("data", [])}
        for name in list(load.stored)[:3]:
            assert name in client.get(f"/v1/collections/more/documents/{name}").json()["text"]


def _kill_and_restart(home: Path, times: int, choose: random.Random) -> str:
    turns: Counter[str] = Counter()
    stored: set[str] = set()
    asked = 0
    with server(home) as up, up.client() as client:
        ingest(client, documents())
        solo = _solo(client)
        load = Load(up, solo, turns, stored)
        load.wait_for_answers()
        time.sleep(choose.random())
        up.signal(signal.SIGKILL)
        assert up.ended() == -signal.SIGKILL
        load.end()
    asked += load.answered
    for number in range(times):
        with server(home) as up:
            _check(up, solo, load)
            if number + 1 < times:
                load = Load(up, solo, turns, stored)
                load.wait_for_answers()
                time.sleep(choose.random())
                up.signal(signal.SIGKILL)
                up.ended()
                load.end()
                asked += load.answered
    return f"{times} kills, {asked} answers before them, {sum(turns.values())} turns, {len(stored)} documents kept"


def test_a_kill_under_load_loses_no_acknowledged_answer_or_conversation(tmp_path: Path) -> None:
    print(_kill_and_restart(tmp_path, 1, random.Random(1)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_under_load_lose_nothing_acknowledged(tmp_path: Path) -> None:
    print(_kill_and_restart(tmp_path, 20, random.Random(2)))


def test_on_sigterm_running_answers_finish_and_every_turn_is_stored(tmp_path: Path) -> None:
    with server(tmp_path) as up, up.client() as client:
        ingest(client, documents())
        solo = _solo(client)
        load = Load(up, solo, Counter(), set())
        load.wait_for_answers()
        up.signal(signal.SIGTERM)
        assert up.ended() == 0
        load.end()
        drained = next(line for line in up.lines if line["event"] == "drained")
        assert drained["cut"] == 0
        assert load.answered > 0
        failed = [
            line for line in up.lines if line.get("status", 0) >= 500 and line["route"] not in ("none", "/readyz")
        ]
        assert failed == []
    with server(tmp_path) as up:
        _check(up, solo, load)
