"""Deleted means gone from every replica's disk, whatever fails in that moment: Redis, or any of the
replicas.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.documents import deletions
from ragkv.api.documents.collections import Collections
from ragkv.chat.passage_matcher import TextMatch
from ragkv.errors import StoreError
from ragkv.store.entry import EntryKey, conversation_group
from tests.api.helpers import FACTS, client_of, engine_of, filled, service_of, wait_until
from tests.faults import raising

from .replicas import QUESTION, AwayRedis, replica

pytestmark = pytest.mark.enable_socket

WAIT_S = 90.0
DOCUMENT = "/v1/collections/facts/documents/0"


@pytest.fixture
def redis() -> Iterator[AwayRedis]:
    with AwayRedis() as redis:
        yield redis


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.api.documents.deletions.POLL_S", 0.05)
    monkeypatch.setattr("ragkv.cluster.shared_deletions.POLL_S", 0.05)


class World:
    """Replicas in this process, with a folder each, that share a home and a Redis server."""

    def __init__(self, model: Engine, home: Path, redis: AwayRedis, stack: ExitStack) -> None:
        self.model = model
        self.home = home
        self.redis = redis
        self._stack = stack
        self._open: dict[str, ExitStack] = {}

    def start(self, name: str) -> TestClient:
        """A replica, which has opened its tenant."""
        own = self._open[name] = ExitStack()
        self._stack.callback(own.close)
        client: TestClient = own.enter_context(
            client_of(replica(self.model, self.home, name, self.redis.url))
        )
        assert client.get("/v1/collections").status_code == 200
        return client

    def stop(self, name: str) -> None:
        self._open.pop(name).close()

    def has(self, name: str, key: EntryKey) -> bool:
        """Whether the entry of a key is on a replica's disk."""
        return any((self.home / name / "kv").glob(f"entries/*/{key.to_text()}*.kv"))

    def stored_by_both(self) -> tuple[TestClient, TestClient, list[EntryKey]]:
        """Two replicas that have the KV of the same documents on their disks, and the keys of its
        entries.
        """
        one = self.start("one")
        other = self.start("other")
        filled(one)
        ask(other)
        engine = engine_of(other.app)
        keys = engine.entries.keys([engine.chunk(text) for text in FACTS])
        wait_until(
            lambda: all(self.has(name, key) for name in ("one", "other") for key in keys), WAIT_S
        )
        return one, other, list(keys)


@pytest.fixture
def world(reader: Engine, tmp_path: Path, redis: AwayRedis) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(reader, tmp_path, redis, stack)


def _nothing(*_: Any) -> None:
    """What a process does that was killed."""


def ask(client: TestClient) -> None:
    response = client.post(
        "/v1/ask", json={"question": QUESTION, "collection": "facts", "k": 2, "max_tokens": 4}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("how", ["refused", "stalled"])
def test_what_is_deleted_while_redis_is_away_is_gone_from_all_disks(
    world: World, redis: AwayRedis, how: str
) -> None:
    one, _, (deleted, kept) = world.stored_by_both()
    redis.leave(how)
    assert one.delete(DOCUMENT).status_code == 200
    assert not world.has("one", deleted)
    wait_until(lambda: not world.has("other", deleted), WAIT_S)  # Redis is still away
    assert world.has("one", kept) and world.has("other", kept)
    redis.come_back()
    remote = engine_of(one.app).parts.store.tiers[-1]
    wait_until(
        lambda: remote.answers and not remote.contains(deleted) and remote.contains(kept), WAIT_S
    )


def test_a_replica_that_is_killed_before_it_announces_a_deletion_leaves_no_kv_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has forgotten the text, and nothing else was done. It is not started again at
    first.
    """
    one, other, (deleted, kept) = world.stored_by_both()
    with monkeypatch.context() as patch:
        patch.setattr(Collections, "_delete_kv", _nothing)
        patch.setattr("ragkv.api.documents.deletions.DeletionFollower.follow", _nothing)
        assert one.delete(DOCUMENT).status_code == 200
        world.stop("one")
    assert world.has("one", deleted)
    wait_until(lambda: not world.has("other", deleted), WAIT_S)
    remote = engine_of(other.app).parts.store.tiers[-1]
    wait_until(lambda: not remote.contains(deleted) and remote.contains(kept), WAIT_S)
    world.start("one")  # after all
    wait_until(lambda: not world.has("one", deleted), WAIT_S)
    assert world.has("one", kept) and world.has("other", kept)


def test_a_replica_that_was_down_drops_what_was_deleted_meanwhile(world: World) -> None:
    one, _, (deleted, kept) = world.stored_by_both()
    world.stop("other")
    assert one.delete(DOCUMENT).status_code == 200
    assert world.has("other", deleted)
    world.start("other")
    wait_until(lambda: not world.has("other", deleted), WAIT_S)
    assert world.has("other", kept)


def test_a_deletion_that_cannot_be_noted_is_not_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, keys = world.stored_by_both()
    with monkeypatch.context() as patch:
        patch.setattr(deletions.DeletionJournal, "add", raising(StoreError("The disk is full.")))
        assert one.delete(DOCUMENT).status_code >= 500
    assert one.get(DOCUMENT).status_code == 200
    assert all(world.has(name, key) for name in ("one", "other") for key in keys)


def test_a_form_of_a_deleted_passage_is_gone_from_the_other_replica(world: World) -> None:
    """A prompt on the other replica held the passage in another writing, whose KV is stored there
    too.
    """
    one, other, _ = world.stored_by_both()
    tenant = service_of(other.app).tenants.opened()[""]
    form = tenant.engine.chunk(FACTS[0].upper())
    # as found in a prompt
    tenant.chat.catalogue.chunk(TextMatch(0, len(form.text), form.text, "", False), None)
    tenant.engine.entries.encode([form])
    (key,) = tenant.engine.entries.keys([form])
    assert world.has("other", key)
    assert one.delete(DOCUMENT).status_code == 200
    wait_until(lambda: not world.has("other", key), WAIT_S)


def test_blocks_of_a_conversation_that_is_gone_from_the_server_are_deleted(
    world: World, redis: AwayRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server came back empty: no log tells of the conversations that it had."""
    monkeypatch.setattr("ragkv.cluster.shared_deletions.TIDY_S", 0.1)
    one = world.start("one")
    filled(one)
    body = {
        "question": QUESTION,
        "collection": "facts",
        "k": 2,
        "max_tokens": 16,
        "session_id": "s",
    }
    for _ in range(2):
        assert one.post("/v1/ask", json=body).status_code == 200
    engine = engine_of(one.app)
    engine.flush()
    (info,) = [info for info in engine.sessions.list() if info.session_id.endswith("s")]
    group = conversation_group(info.session_id)
    blocks = {entry.key for entry in engine.parts.store.contents.sample() if entry.group == group}
    assert blocks and all(world.has("one", key) for key in blocks)
    redis.server.kill()
    redis.server.start()
    wait_until(lambda: not any(world.has("one", key) for key in blocks), WAIT_S)
    one.post("/v1/ask", json=body)
