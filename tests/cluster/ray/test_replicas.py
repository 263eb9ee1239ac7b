"""Two and four replicas under Ray Serve with a real Redis give the answers of one process of the
same service.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_socket

from ragkv.runtime import Closing
from tests.cluster.servers import RedisServer, free_port
from tests.reader import READER

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ragkv[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.enable_socket, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
FACTS = [
    ("Enswyn", "Marl", "harp"),
    ("Odrun", "Fenwick", "drum"),
    ("Tamsil", "Brae", "flute"),
    ("Wyeth", "Corr", "horn"),
]
DOCUMENTS = [
    {
        "id": f"d{number}",
        "text": f"{name} founded {town} in the year {1200 + number}. {name} plays the {thing}.",
    }
    for number, (name, town, thing) in enumerate(FACTS)
]
QUESTIONS = [
    "Who founded Marl?", "Which instrument does Enswyn play?", "Who founded Brae?", "When was it "
                                                                                    "founded?",
    "Who plays the drum?", "Which town did Odrun found?", "Who founded Corr?", "Which instrument "
                                                                               "does Wyeth play?",
]  # fmt: skip


def endless_reader(folder: Path) -> Path:
    """The reader of the tests without an end token: each answer has the maximum length."""
    shutil.copytree(READER, folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": 3}))
    return folder


class Cluster(Closing):
    """A driver process and the service that it deploys."""

    def __init__(self, home: Path, model: Path, redis: RedisServer) -> None:
        self.port = free_port()
        self._home = home
        self._model = model
        self._redis = redis
        self._log = (home / "driver.log").open("w")
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1",
            "RAY_DEDUP_LOGS": "0", "RAY_raylet_start_wait_time_s": "180",
        }  # fmt: skip
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray.driver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def deploy(self, replicas: int, router: str) -> float:
        cluster = {"replicas": replicas, "router": router, "cpus": 0.5}
        store = {
            "memory_bytes": 200_000_000,
            "disk_bytes": 500_000_000,
            "redis": {"url": self._redis.url},
        }
        settings = {
            "home": str(self._home), "model": str(self._model), "store": store, "session": {"shared": True},
            "serve": {"port": self.port, "cluster": cluster, "kv_home": str(self._home / "kv")},
        }  # fmt: skip
        return float(self._ask({"deploy": settings})["up"])

    def where(self) -> dict[str, int]:
        return dict(self._ask({"where": True})["where"])

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=timeout_s, trust_env=False
        )

    def close(self) -> None:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.close()
        self._log.close()
        try:
            self._popen.wait(60)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        print(json.dumps(what), file=self._popen.stdin, flush=True)
        for line in self._popen.stdout:
            if line.startswith("driver:"):
                return dict(json.loads(line.removeprefix("driver:")))
        raise AssertionError(f"the driver ended: {(self._home / 'driver.log').read_text()[-3000:]}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_reader(tmp_path_factory.mktemp("model") / "reader-without-end")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    pytest_socket.enable_socket()
    with (
        RedisServer() as redis,
        Cluster(tmp_path_factory.mktemp("cluster"), model, redis) as cluster,
    ):
        cluster.deploy(2, "round-robin")
        yield cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[list[str]]:
    """The answers of one process to all questions."""
    from starlette.testclient import TestClient

    from ragkv.api import ServeConfig, create_app

    pytest_socket.enable_socket()
    config = ServeConfig(home=str(tmp_path_factory.mktemp("alone")), model=str(model))
    with TestClient(create_app(config), base_url="http://127.0.0.1") as client:
        while client.get("/readyz").status_code != 200:
            time.sleep(0.1)
        store(client)
        yield [turn(client, "s", number)["answer"] for number in range(len(QUESTIONS))]


def store(client: httpx.Client) -> None:
    client.post("/v1/collections", json={"name": "docs"}).raise_for_status()
    client.post("/v1/collections/docs/documents", json={"documents": DOCUMENTS}).raise_for_status()


def question_body(number: int, session: str | None, **more: Any) -> dict[str, Any]:
    question = {
        "question": QUESTIONS[number],
        "collection": "docs",
        "k": 2,
        "max_tokens": 12,
        **more,
    }
    return question if session is None else {**question, "session_id": session}


def turn(client: httpx.Client, session: str, number: int, **more: Any) -> dict[str, Any]:
    """A turn that reuses only exact KV, so that its answer is that of a full prefill, whatever is
    stored.
    """
    response = client.post("/v1/ask", json=question_body(number, session, reuse="prefix", **more))
    assert response.status_code == 200, response.text
    return {**response.json(), "replica": response.headers.get("x-replica", "")}


def test_two_replicas_share_chunks_and_a_conversation(cluster: Cluster, alone: list[str]) -> None:
    with cluster.client() as client:
        store(client)
        reuses = {}
        for _ in range(4):  # round robin: each replica twice
            response = client.post("/v1/ask", json=question_body(0, None))
            reuses.setdefault(response.headers["x-replica"], response.json()["reuse"])
        assert len(reuses) == 2
        # One replica encoded the chunks, and both have them.
        assert all(reuse["missed_chunks"] == 0 for reuse in reuses.values())
        assert any(reuse["bytes_by_tier"].get("redis", 0) > 0 for reuse in reuses.values())
        turns = [turn(client, "s", number) for number in range(len(QUESTIONS))]
    assert [one["answer"] for one in turns] == alone
    assert min(Counter(one["replica"] for one in turns).values()) >= 3  # on both replicas
    assert turns[-1]["reuse"]["exact"] > turns[-1]["reuse"]["computed"]  # history is reused


def test_a_rolling_update_to_four_replicas_loses_no_turn_of_a_conversation(
    cluster: Cluster, alone: list[str]
) -> None:
    answers: list[str] = []
    done = threading.Event()

    def talk() -> None:
        with cluster.client() as client:
            number = 0
            while not (done.is_set() and number >= len(QUESTIONS)):
                session = f"rolling-{number // len(QUESTIONS)}"
                answers.append(turn(client, session, number % len(QUESTIONS))["answer"])
                number += 1
                time.sleep(0.3)

    before = set(cluster.where())
    with ThreadPoolExecutor(1) as pool:
        talking = pool.submit(talk)
        cluster.deploy(4, "round-robin")
        done.set()
        talking.result(120)
    assert not before & set(cluster.where())
    assert answers == [alone[number % len(alone)] for number in range(len(answers))]
    with cluster.client() as client:
        assert turn(client, "s", 0)["answer"]  # a conversation from before the update
        shown = client.get("/v1/sessions/s").json()
        assert shown["turns"] == len(QUESTIONS) + 1


def test_concurrent_turns_of_a_session_conflict_and_none_is_lost(cluster: Cluster) -> None:
    def ask(number: int) -> int:
        with cluster.client() as client:
            for tries in range(20):
                response = client.post(
                    "/v1/ask", json=question_body(number, "busy", reuse="prefix")
                )
                if response.status_code == 200:
                    return tries
                assert (
                    response.status_code == 409
                    and response.json()["error"]["code"] == "session_conflict"
                )
        raise AssertionError("never answered")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    with cluster.client() as client:
        assert client.get("/v1/sessions/busy").json()["turns"] == 4


def test_a_replica_killed_before_its_first_byte_is_replaced_without_an_error(
    cluster: Cluster, alone: list[str]
) -> None:
    cluster.deploy(2, "sticky")
    with cluster.client() as client:
        home = {turn(client, "killed", number)["replica"] for number in range(2)}
        assert len(home) == 1  # the replica that has its history
        where = cluster.where()
        victim = where[home.pop()]
        os.kill(victim, signal.SIGSTOP)  # it takes the request and sends nothing
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(turn, client, "killed", 2)
            time.sleep(1.5)
            assert not waiting.done()
            os.kill(victim, signal.SIGKILL)
            third = waiting.result(120)
        assert third["answer"] == alone[2] and where[third["replica"]] != victim
        assert turn(client, "killed", 3)["answer"] == alone[3]
        assert client.get("/v1/sessions/killed").json()["turns"] == 4


def test_a_replica_killed_during_an_answer_ends_the_stream_with_an_error_and_a_retry_works(
    cluster: Cluster, alone: list[str]
) -> None:
    _wait_for(cluster, 2)
    with cluster.client() as client:
        first = turn(client, "streamed", 0)
        where = cluster.where()
        body = question_body(1, "streamed", reuse="prefix", stream=True, max_tokens=250)
        events: list[str] = []
        last = ""
        with client.stream("POST", "/v1/ask", json=body) as response:
            assert response.headers["x-replica"] == first["replica"]  # it has the history
            for line in response.iter_lines():
                events += [line] if line.startswith("event:") else []
                # the first text; 250 tokens follow
                if line == "event: token" and events.count(line) == 1:
                    os.kill(where[first["replica"]], signal.SIGKILL)
                last = line or last
        assert events[-1] == "event: error" and "event: answer" not in events
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert turn(client, "streamed", 1)["answer"] == alone[1]  # the retry
        assert client.get("/v1/sessions/streamed").json()["turns"] == 2


def test_questions_to_the_same_collection_go_to_the_same_replica_until_it_is_overloaded(
    cluster: Cluster,
) -> None:
    _wait_for(cluster, 2)
    with cluster.client() as client:
        destinations = [
            client.post("/v1/ask", json=question_body(n % 2, None)).headers["x-replica"]
            for n in range(8)
        ]
        assert len(set(destinations)) == 1
        with ThreadPoolExecutor(8) as pool:
            body = question_body(0, None, max_tokens=100)
            crowd = list(
                pool.map(
                    lambda _: client.post("/v1/ask", json=body).headers["x-replica"], range(16)
                )
            )
        assert len(set(crowd)) == 2


def _wait_for(cluster: Cluster, replicas: int) -> None:
    """Wait until this many replicas are up."""
    ends = time.monotonic() + 120
    while len(cluster.where()) < replicas:
        assert time.monotonic() < ends
        time.sleep(1)
