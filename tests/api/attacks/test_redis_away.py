"""Redis goes away at every moment of a replica's life: only requests that name a conversation are
refused.
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from tests.api.helpers import FACTS, app_on, client_of, filled, metrics, on_port, plain, wait_until
from tests.scheduling.helpers import begin

from .replicas import QUESTION, AwayRedis, Replicas, Talk, chat, replica, running

pytestmark = pytest.mark.enable_socket

NAMED = {"question": QUESTION, "collection": "facts", "session_id": "s"}
UNNAMED = {"question": QUESTION, "collection": "facts"}


@pytest.fixture
def redis() -> Iterator[AwayRedis]:
    with AwayRedis() as redis:
        yield redis


@pytest.fixture
def alone(reader: Engine, tmp_path: Path) -> str:
    """The answer of a server without Redis."""
    with client_of(app_on(reader, tmp_path / "alone")) as client:
        filled(client)
        return str(client.post("/v1/ask", json=UNNAMED).json()["answer"])


def answered(client: TestClient, alone: str) -> list[str]:
    """The notes of a question without a conversation; its answer is that of a server
    without Redis.
    """
    response = client.post("/v1/ask", json=UNNAMED)
    assert response.status_code == 200 and response.json()["answer"] == alone, response.text
    notes = response.json()["reuse"]["notes"]
    return [note for note in notes if not note.startswith("floor: ")]  # the prompt is tiny


def refused(client: TestClient) -> dict[str, Any]:
    """The error of a question that names a conversation."""
    response = client.post("/v1/ask", json=NAMED)
    assert response.status_code == 503 and "retry-after" in response.headers, response.text
    return dict(response.json()["error"])


@pytest.mark.parametrize("how", ["refused", "stalled"])
def test_a_replica_that_starts_while_redis_is_away_refuses_named_conversations_alone(
    reader: Engine, tmp_path: Path, redis: AwayRedis, alone: str, how: str
) -> None:
    redis.leave(how)
    with client_of(replica(reader, tmp_path, "kv", redis.url)) as client:
        assert client.get("/readyz").status_code == 200
        filled(client)  # creates a collection and stores documents
        assert any("redis does not answer" in note for note in answered(client, alone))
        error = refused(client)
        assert (
            error["code"] == "session_unavailable"
            and "ask without a conversation" in error["message"]
        )
        assert (
            len(client.get("/v1/stats").json()["degraded"])
            == len(client.get("/readyz").json()["degraded"])
            == 2
        )
        seen = metrics(client)
        for remote in ("redis", "conversations"):
            labels = f'{{remote="{remote}",tenant=""}}'
            assert seen[f"ragkv_remote_answers{labels}"] == 0
            assert seen[f"ragkv_remote_away_seconds_total{labels}"] > 0
            assert seen[f"ragkv_remote_failures_total{labels}"] > 0
        redis.come_back()
        wait_until(lambda: client.get("/v1/stats").json()["degraded"] == [], 90)
        assert answered(client, alone) == []
        assert client.post("/v1/ask", json=NAMED).status_code == 200
        assert metrics(client)['ragkv_remote_answers{remote="redis",tenant=""}'] == 1


def test_an_outage_costs_a_few_timeouts_and_not_one_for_each_request(
    reader: Engine, tmp_path: Path, redis: AwayRedis, alone: str
) -> None:
    with client_of(replica(reader, tmp_path, "kv", redis.url)) as client:
        filled(client)
        redis.leave("stalled")
        for _ in range(4):
            answered(client, alone)
            refused(client)
        seen = metrics(client)
        remotes = [f'{{remote="{remote}",tenant=""}}' for remote in ("redis", "conversations")]
        assert all(seen[f"ragkv_remote_failures_total{remote}"] <= 6 for remote in remotes)
        assert any(seen[f"ragkv_remote_skipped_total{remote}"] for remote in remotes)


def test_redis_that_leaves_during_a_turn_costs_the_turn_of_a_named_conversation_alone(
    talker: Engine, tmp_path: Path, redis: AwayRedis
) -> None:
    with on_port(app_on(talker, tmp_path / "alone")) as url, plain(url) as client:
        wanted, _ = chat(client, [{"role": "user", "content": "Tell me"}], max_tokens=200)
    with on_port(replica(talker, tmp_path, "kv", redis.url)) as url, plain(url) as client:
        assert (
            chat(client, [{"role": "user", "content": "Tell me"}], max_tokens=4, session="s")[1]
            == "end"
        )
        body = {
            "model": client.get("/v1/models").json()["data"][-1]["id"],
            "max_tokens": 200,
            "stream": True,
        }
        body["messages"] = [{"role": "user", "content": "Tell me"}]
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(line for line in lines if '"content":"' in line)
            redis.leave("refused")
            rest = [line.removeprefix("data: ") for line in (first, *lines) if line]
        assert rest[-1] == "[DONE]"
        report = json.loads(rest[-2])["ragkv"]
        assert any("not stored for the next one" in note for note in report["reuse"]["notes"])
        again = chat(client, [{"role": "user", "content": "Tell me"}], max_tokens=200)
        assert again == (wanted, "end")
        assert "session_unavailable" in chat(client, body["messages"], max_tokens=4, session="s")[1]
        redis.come_back()
        wait_until(
            lambda: chat(client, body["messages"], max_tokens=4, session="s")[1] == "end", 120
        )
        assert client.get("/v1/sessions/s").json()["turns"] == 2


def test_a_replica_closes_in_time_while_redis_is_away(
    reader: Engine, tmp_path: Path, redis: AwayRedis, alone: str
) -> None:
    with client_of(replica(reader, tmp_path, "kv", redis.url)) as client:
        filled(client)
        redis.leave("stalled")
        answered(client, alone)
        began = time.monotonic()
    assert time.monotonic() - began < 30.0
    redis.come_back()
    with client_of(replica(reader, tmp_path, "kv", redis.url)) as client:
        assert answered(client, alone) == []


def test_documents_deleted_while_redis_is_away_take_unnamed_conversations_with_them(
    talker: Engine, tmp_path: Path, redis: AwayRedis
) -> None:
    messages = [{"role": "user", "content": "Tell me"}]
    with on_port(replica(talker, tmp_path, "kv", redis.url)) as url, plain(url) as client:
        filled(client, texts=FACTS)
        text, _ = chat(client, messages, max_tokens=4)
        (saved,) = redis.saved()
        redis.leave("refused")
        assert client.delete("/v1/collections/facts/documents/0").status_code == 200
        redis.come_back()
        longer = [
            *messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And?"},
        ]

        def is_deleted() -> bool:
            assert chat(client, longer, max_tokens=4)[1] == "end"
            return saved not in redis.saved()

        wait_until(is_deleted, 120)


@pytest.mark.parametrize(
    "replacements",
    [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="20-slow")],
)
def test_no_turn_is_lost_while_replicas_are_started_and_replaced(
    talker: Engine, tmp_path: Path, redis: AwayRedis, replacements: int
) -> None:
    """Conversations with and without a name go on while replicas are started and replaced.

    Their turns are those of one server that is not disturbed.
    """
    with running(Replicas(talker, tmp_path, redis.url), 2) as replicas:
        done = threading.Event()
        talks = [Talk("Say", 4), Talk("Tell", 4), Talk("Name", 4, named=True)]
        threads = [begin(talk.run, replicas.urls, done) for talk in talks]
        for _ in range(replacements):
            replicas.replace_oldest()
        done.set()
        for thread in threads:
            thread.join()
        assert {end for talk in talks for end in talk.ends} == {"end"}
        with plain(replicas.urls[0]) as client:
            named = client.get("/v1/sessions").json()["data"]
        assert {one["turns"] for one in named} == {4} and len(named) == len(talks[2].rounds)
    with running(Replicas(talker, tmp_path / "alone", redis.url_of_another_database), 1) as alone:
        for talk in talks:
            same = Talk(talk.first, 4)
            same.run(alone.urls)
            assert all(messages == same.rounds[0] for messages in talk.rounds)
