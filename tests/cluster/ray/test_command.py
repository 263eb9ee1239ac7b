"""The line for replicas, as docs/scale.md has it, on one machine: answers, ports, names, and its
end.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.servers import RedisServer, free_port

from .test_replicas import DOCUMENTS, QUESTIONS

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ragkv[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.enable_socket, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
START_S = 600.0
LISTENING = "0A"  # in /proc/net/tcp
LOOPBACKS = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def command() -> list[str]:
    """The command in docs/scale.md, with this Python's own ragkv."""
    (line,) = re.findall(
        r"^RAGKV_STORE__REDIS__URL=\S+ ragkv (serve --ray [^#\n]*)",
        (ROOT / "docs" / "scale.md").read_text("utf-8"),
        re.MULTILINE,
    )
    return [sys.executable, "-m", "ragkv", *line.split()]


@contextmanager
def serving(
    folder: Path, port: int, redis: RedisServer, until: str = "ragkv serves", status: int = 0
) -> Iterator[tuple[httpx.Client, "subprocess.Popen[str]", Path]]:
    log = folder / "log"
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAGKV_SERVE__PORT": str(port),
        "RAGKV_STORE__REDIS__URL": redis.url,
        "RAY_DEDUP_LOGS": "0", "RAY_raylet_start_wait_time_s": "180", "TEST_FOLDER": str(folder),
    }  # fmt: skip
    with log.open("a") as file:
        before = file.tell()
        popen = subprocess.Popen(
            command(), cwd=folder, env=environment, stdout=file, stderr=file, text=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            ends = time.monotonic() + START_S
            while until not in log.read_text()[before:] or not (status or _is_ready(client)):
                assert popen.poll() is None and time.monotonic() < ends, log.read_text()[-3000:]
                time.sleep(0.5)
            yield client, popen, log
    finally:
        popen.send_signal(signal.SIGTERM)
        try:
            assert popen.wait(120) == status
        finally:
            popen.kill()


def _is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/readyz").status_code == 200
    return False


def processes(folder: Path, parent: int) -> dict[int, str]:
    """The processes that the command `parent` started, with their names."""
    found = {}
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TEST_FOLDER={folder}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "comm").read_text().strip()
    return found


def open_to_others(pids: dict[int, str]) -> Counter[str]:
    """How many ports these processes listen on that other machines could reach, by the process'
    name.
    """
    listening: dict[str, str] = {}  # address by inode
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTENING:
                listening[fields[9]] = fields[1].partition(":")[0]
    found: Counter[str] = Counter()
    for pid, name in pids.items():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
                if listening.get(inode, LOOPBACKS[0]) not in LOOPBACKS:
                    found[name] += 1
    return found


def test_the_readmes_line_for_replicas_works_as_written_on_a_redis_server(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    port = free_port()
    body = {"collection": "docs", "k": 2, "max_tokens": 8, "session_id": "s"}
    with serving(tmp_path, port, own_redis) as (client, popen, log):
        assert client.post("/v1/collections", json={"name": "docs"}).status_code == 201
        assert (
            client.post("/v1/collections/docs/documents", json={"documents": DOCUMENTS}).status_code
            == 201
        )
        for question in QUESTIONS[:3]:
            assert client.post("/v1/ask", json={**body, "question": question}).status_code == 200
        replicas = {
            client.get("/v1/stats").headers["x-replica"]: client.get("/v1/stats").json()
            for _ in range(12)
        }
        stats = client.get("/v1/stats")
        assert (
            stats.headers["x-replica"] == stats.json()["replica"] and stats.json()["degraded"] == []
        )
        started = set(
            re.findall(r'"event": "replica_started[^{}]*"replica": "(\w+)"', log.read_text())
        )
        assert len(started) == 4 and set(replicas) <= started
        own = processes(tmp_path, popen.pid)
        reachable = open_to_others(own)
        # one each, by Ray's choice
        assert all(name.startswith("ray::ServeRepli") for name in reachable), reachable
        assert reachable.total() <= 5
        assert "this machine only" in log.read_text()
    assert not [pid for pid in own if Path(f"/proc/{pid}").exists()]
    # the conversation and the documents are still there
    with serving(tmp_path, port, own_redis) as (client, _, _):
        assert client.get("/v1/sessions/s").json()["turns"] == 3
        asked = client.post("/v1/ask", json={**body, "question": QUESTIONS[3]})
        assert asked.status_code == 200, json.dumps(asked.json())
        assert client.get("/v1/sessions/s").json()["turns"] == 4


def test_a_signal_during_the_start_closes_what_was_started(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    with serving(tmp_path, free_port(), own_redis, until="Started Serve", status=143) as (
        _,
        popen,
        _,
    ):
        own = processes(tmp_path, popen.pid)
    assert own and not [pid for pid in own if Path(f"/proc/{pid}").exists()]
