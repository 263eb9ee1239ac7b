"""The soak in short, and kills of a server that has no replica. `make soak` is the long form."""

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .client import ASK, Client, Solo, question_body
from .run import Plan, clients_of, prepared, soak, verify_all
from .world import TENANTS, World

pytestmark = [pytest.mark.enable_socket, pytest.mark.timeout(600)]


def test_a_replica_that_is_killed_under_mixed_load_loses_nothing_acknowledged_and_no_answer_is_wrong(
    tmp_path: Path,
) -> None:
    plan = Plan(
        minutes=0.1,
        out=tmp_path,
        replace_every_s=60.0,
        outage_every_s=8.0,
        outage_s=2.0,
        reading_s=2.0,
    )
    assert soak(plan) == [], (tmp_path / "soak.log").read_text()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One server, which has what every tenant asks about."""
    world = World(tmp_path / "home", tmp_path)
    yield world
    world.close()


def load(world: World, clients: list[Client], by: signal.Signals) -> None:
    """End the server under load."""
    answered = world.findings.counts["requests answered"]
    for one in clients:
        one.start()
    ends = time.monotonic() + 60
    while world.findings.counts["requests answered"] < answered + 10 and time.monotonic() < ends:
        time.sleep(0.01)
    time.sleep(random.random())
    for one in clients:
        one.stop.set()  # each ends with the request that it has sent
    world.end(world.serving[0], by, lag_s=0.0)
    for one in clients:
        one.end()
    assert world.findings.counts["requests answered"] > answered


def check(world: World, solo: Solo, clients: list[Client]) -> None:
    """After a restart everything acknowledged holds, and stored KV is found."""
    world.start()
    verify_all(world, clients)
    with world.serving[0].process.client(headers=world.headers[TENANTS[0]]) as client:
        for question, expected in solo.questions.items():
            found = client.post(ASK, json=question_body(question, "fused")).json()
            assert (found["answer"], found["reuse"]["missed_chunks"]) == (expected, 0)
    assert world.findings.failures == []


@pytest.mark.parametrize(
    "kills", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_kills_under_load_lose_nothing_acknowledged(world: World, kills: int) -> None:
    world.start()
    solo = prepared(world)
    clients = clients_of(world, solo)
    for _ in range(kills):
        load(world, clients, signal.SIGKILL)
        check(world, solo, clients)


def test_on_sigterm_running_answers_finish_and_every_turn_is_stored(world: World) -> None:
    name = world.start().name
    solo = prepared(world)
    clients = clients_of(world, solo)
    load(world, clients, signal.SIGTERM)
    lines = [json.loads(line) for line in (world.logs / f"{name}.log").read_text().splitlines()]
    assert lines and "cut" not in {line["event"] for line in lines}
    assert [
        line for line in lines if line.get("status", 0) >= 500 and line["route"] != "/readyz"
    ] == []
    check(world, solo, clients)
