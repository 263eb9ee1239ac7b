"""`ragkv serve` behind the shipped nginx under each attack of `attackers.py`, beside a bystander
who searches and asks.

The short form, on the small reader, holds loose bounds, because machines that test are busy. The
long form is on SmolLM2. `pytest -s` prints what is measured.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.whole import ask, documents, ingest
from tests.reader import READER
from tests.scheduling.helpers import until

from .attackers import ATTACKS, LEAVING
from .front import BEHIND, needs_nginx, nginx
from .helpers import QUESTION, Target, Watch, runs, target

pytestmark = [needs_nginx, pytest.mark.enable_socket, pytest.mark.timeout(600)]
SETTINGS = {  # stored KV is not what a test of memory looks for
    **BEHIND, "RAGKV_STORE__MEMORY_BYTES": "20000000", "RAGKV_SERVE__GRACEFUL_S": "2",
}  # fmt: skip
LEFT_S = {READER: 3.0, "smollm2": 1.0}  # of a core, after a client has left ...
IDLE_S = 2.0  # ... until the server did nothing for so long
# ... or for so long after its start: an engine measures its profile after 3 s without a request
OWN_S = 4.0
# the model, and the seconds of an attack
SHORT = (READER, 1.5)
LONG = ("smollm2", 8.0)
# Beside these answers are few: they last three times as long.
SLOWED = ("long messages", "250 conditions, asked")
AT_SIGTERM = ("long chats", "250 conditions", "angle brackets")


@contextmanager
def behind(home: Path, model: str = READER) -> Iterator[Target]:
    """A server behind nginx, whose bystander has asked."""
    with target(home, SETTINGS, "--mcp", "--model", model) as up, nginx(home, up.port) as port:
        yield dataclasses.replace(up, port=port)


@contextmanager
def attack(
    up: Target, name: str, seconds: float, model: str = READER, clients: int = 0
) -> Iterator["subprocess.Popen[str]"]:
    """Attack in another process; the block begins with the attack. 0 clients: as in the table of
    attacks.
    """
    secret = up.attacker_headers["authorization"].removeprefix("Bearer ")
    command = [sys.executable, "-m", "tests.api.attacks.attackers", name, str(up.port), secret]
    command += [str(seconds), str(clients)]
    environment = {**os.environ, "ATTACKED_MODEL": model}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as popen:
        assert popen.stdin is not None and popen.stdout is not None
        assert popen.stdout.readline() == "ready\n"
        popen.stdin.write("\n")
        popen.stdin.flush()
        try:
            yield popen
        finally:
            popen.kill()


def work_left_s(up: Target, idle_s: float) -> float:
    """Seconds of a core that the server uses before it does nothing for `idle_s`."""
    used = [up.cpu_s()]
    while len(used) <= (back := int(idle_s / 0.5)) or used[-1] - used[-1 - back] > 0.1:
        time.sleep(0.5)
        used.append(up.cpu_s())
    return used[-1] - used[0]


@pytest.fixture(
    scope="module",
    params=[SHORT, pytest.param(LONG, marks=pytest.mark.slow)],
    ids=lambda one: str(one[0]),
)
def front(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Target, str, float]]:
    import pytest_socket

    pytest_socket.enable_socket()
    model, seconds = request.param
    with behind(tmp_path_factory.mktemp("home"), model) as up:
        # the first ones take memory that stays
        for name in ("documents", "long chats", "embeddings"):
            with attack(up, name, seconds, model) as attackers:
                attackers.communicate()
        print(
            f"\n{work_left_s(up, OWN_S):.1f} s of a core for profiles, and for KV of documents "
            "that were stored"
        )
        with Watch(up) as quiet:
            time.sleep(2 * seconds)
        with up.bystander() as client:
            prefill_s = ask(client, QUESTION, reuse="none").json()["timing"]["first_token_s"]
        print(f"{'quiet':24}{quiet}; one prefill {prefill_s:.3f} s")
        yield up, model, seconds


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_harms_no_bystander_and_leaves_no_memory(
    front: tuple[Target, str, float], name: str
) -> None:
    up, model, seconds = front
    with (
        attack(up, name, 3 * seconds if name in SLOWED else seconds, model) as attackers,
        Watch(up) as watch,
    ):
        statuses, _ = attackers.communicate()
    print(f"{name:24}{watch}; attackers {statuses.strip()}")
    watch.assert_unharmed()
    assert '"500"' not in statuses
    assert [line for line in up.process.take_lines() if line.get("level") == "error"] == []


@pytest.mark.parametrize("name", LEAVING)
def test_a_client_that_leaves_leaves_no_work(front: tuple[Target, str, float], name: str) -> None:
    up, model, _ = front
    # documents with KV: what a question misses is made for the next one
    with up.client(up.attacker_headers) as client:
        client.delete("/v1/collections/c")
        assert ingest(client, documents()).status_code == 201
    work_left_s(up, IDLE_S)
    with attack(up, name, 1.5, model, clients=1) as attackers:
        attackers.communicate()
    left_s = work_left_s(up, IDLE_S)
    print(f"{name:24}{left_s:.2f} s of a core after its client had left")
    assert left_s < LEFT_S[model]


@pytest.mark.parametrize(
    "name",
    [one if one in AT_SIGTERM else pytest.param(one, marks=pytest.mark.slow) for one in ATTACKS],
)
def test_sigterm_ends_an_attacked_server_in_time(tmp_path: Path, name: str) -> None:
    with behind(tmp_path) as up, attack(up, name, 20.0):
        time.sleep(2.0)
        children = up.children()
        began = time.monotonic()
        up.process.signal(signal.SIGTERM)
        status = up.process.ended(60)
        print(f"\n{name:24}ended {time.monotonic() - began:.1f} s after SIGTERM")
        assert status == 0
        until(lambda: not any(map(runs, children)), 30.0, 0.05)
