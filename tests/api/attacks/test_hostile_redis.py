"""Someone who can write to Redis replays, renames and forges what is there: no request fails, and
with a secret none of it is believed. Nothing is allocated from what a value says of itself, and no
tenant's request asks for another tenant's keys.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine
from ragkv.cluster import entry_values
from ragkv.cluster.redis_client import RedisClient as Client
from ragkv.config import RedisConfig
from ragkv.errors import RemoteError
from ragkv.sessions import manifest
from ragkv.store.entry import EntryKey
from ragkv.store.record import CHECKSUM_CHARS, checksum
from ragkv.store.stored_form import stored_form
from tests.cluster.faulty_proxy import Proxy
from tests.cluster.helpers import hit, redis_store, unique_prefix
from tests.cluster.servers import LOOPBACK, RedisServer
from tests.engine.helpers import A, B
from tests.sessions.helpers import ask, engine_at, is_full_prefill, question
from tests.store.entries import make_entry

pytestmark = pytest.mark.enable_socket

SECRET = "a secret of many characters"
SHARED = {"shared": True}


@pytest.fixture(params=["with a secret", "without a secret"])
def config(
    request: pytest.FixtureRequest, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> RedisConfig:
    monkeypatch.setenv("KV_SECRET", SECRET)
    variable = "KV_SECRET" if request.param == "with a secret" else None
    url = f"unix://{redis_server.socket}"
    return RedisConfig(
        url=url, prefix=unique_prefix(), ttl_s=None, timeout_s=10.0, secret_variable=variable
    )


class Vandal:
    """Someone who can write to the server: finds names by their form, and changes what is there."""

    def __init__(self, config: RedisConfig) -> None:
        self.prefix = config.prefix
        self.client = Client(config).client

    def entry(self, key: EntryKey) -> str:
        """The name of an entry, of the only tenant: a hash of values."""
        return self.name(f"*:e:{key.to_text()}")

    def name(self, pattern: str) -> str:
        """The one name that fits."""
        (found,) = self.client.scan_iter(f"{self.prefix}:{pattern}")
        return str(found.decode())

    def manifest(self, session: str) -> bytes:
        return bytes(self.client.hget(self.name(f"sessions:*:m:{session}"), "data"))

    def plant(self, session: str, data: bytes) -> None:
        """Put another manifest under a conversation's name."""
        self.client.hset(
            self.name(f"sessions:*:m:{session}"), mapping={"edition": "x", "data": data}
        )


@pytest.fixture
def vandal(config: RedisConfig) -> Vandal:
    return Vandal(config)


@pytest.fixture
def engine(
    tmp_path: Path, config: RedisConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine with a conversation `s` of one turn, which looks for deletions all the time."""
    monkeypatch.setattr("ragkv.cluster.shared_deletions.POLL_S", 0.02)
    with engine_at(tmp_path, session=SHARED, redis=config) as engine:
        ask(engine, engine.session("s"), 0)
        yield engine


JSON_START = CHECKSUM_CHARS + 8


def json_end(value: bytes) -> int:
    return JSON_START + int(value[CHECKSUM_CHARS:JSON_START], 16)


def facts_of(value: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(value[JSON_START : json_end(value)])
    return facts


def forged_head(old: bytes, facts: dict[str, Any]) -> bytes:
    """The value `old` with other facts, its checksum right for a reader without a secret."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    rest = b"%08x" % len(text) + text
    return checksum(rest).encode() + rest + old[json_end(old) :]


# Entries


def test_a_value_under_another_key_is_a_miss(config: RedisConfig, vandal: Vandal) -> None:
    with redis_store(config) as store:
        for number in (1, 2):
            store.durable.put(make_entry(number))
        one, two = (make_entry(number).info.key for number in (1, 2))
        vandal.client.hset(vandal.entry(two), mapping=vandal.client.hgetall(vandal.entry(one)))
        assert hit(store, 2) is None and hit(store, 1) is not None


def test_an_old_layer_group_is_not_mixed_with_a_newer_entry(
    config: RedisConfig, vandal: Vandal
) -> None:
    """Two writings of one key, as two versions of a library may compute them."""
    with redis_store(replace(config, group_bytes=1)) as store:
        old = make_entry(1)
        old.kv.add_(1)
        store.durable.put(old)
        name = vandal.entry(old.info.key)
        replayed = vandal.client.hget(name, 1)
        assert replayed and store.delete(old.info.key)
        store.durable.put(make_entry(1))
        vandal.client.hset(name, 1, replayed)
        lease = store.lease(old.info.identity, old.info.token_ids)
        assert lease is not None
        with lease, pytest.raises(Exception, match="does not match"):
            for layer in range(old.info.layers):
                lease.read_layer(layer)


def test_a_huge_value_is_not_fetched(
    redis_server: RedisServer, config: RedisConfig, vandal: Vandal
) -> None:
    with Proxy((LOOPBACK, redis_server.port)) as proxy:
        config = replace(config, url=f"redis://{LOOPBACK}:{proxy.port}/0", group_bytes=1)
        with redis_store(config) as store:
            entry = make_entry(1)
            store.durable.put(entry)
            name = vandal.entry(entry.info.key)
            for layer_group in (0, 1):
                vandal.client.hset(
                    name, layer_group, vandal.client.hget(name, layer_group) + bytes(200 * 1024**2)
                )
            before = proxy.answered_bytes
            lease = store.lease(entry.info.identity, entry.info.token_ids)
            if lease is not None:
                with lease, pytest.raises(Exception, match=r"damaged|bytes that were written"):
                    lease.read_layer(0)
                    lease.read_layer(1)
            assert proxy.answered_bytes - before < 2 * 1024**2
            vandal.client.delete(name)


@pytest.mark.parametrize("config", ["without a secret"], indirect=True)
@pytest.mark.parametrize(
    "wrong", [None, -1, 10**12, 10**400, 1.5, "x", [], {}, [10**9] * 4, [-1, 1, 1, 1]]
)
def test_a_head_with_forged_facts_is_a_miss_or_harmless(
    config: RedisConfig, vandal: Vandal, wrong: Any
) -> None:
    with redis_store(config) as store:
        entry = make_entry(1)
        store.durable.put(entry)
        name = vandal.entry(entry.info.key)
        genuine = vandal.client.hget(name, 0)
        facts = facts_of(genuine)
        forgeries = [{fact: made} for fact in facts for made in (wrong, json.dumps(wrong))]
        forgeries += [{fact: [wrong] * 4} for fact in facts]
        for forgery in forgeries:
            vandal.client.hset(name, 0, forged_head(genuine, {**facts, **forgery}))
            lease = store.lease(entry.info.identity, entry.info.token_ids)  # raises nothing
            if lease is not None:
                lease.close()
            store.durable.put(entry)


@pytest.mark.parametrize("config", ["without a secret"], indirect=True)
def test_an_engine_computes_what_a_forged_entry_has_in_another_shape(
    config: RedisConfig, vandal: Vandal
) -> None:
    with engine_at(None, redis=config, memory_bytes=0) as engine:
        engine.entries.encode([A])
        wanted = engine.answer(question(0), [A], max_new_tokens=4, reuse="none").token_ids
        (info,) = engine.parts.store.contents.infos()
        forged = replace(info, layers=1, kv_heads=1, head_dim=2)
        kv = make_entry(1).kv.new_zeros((1, *forged.shape), dtype=info.dtype)
        entry = replace(make_entry(1), info=forged, kv=kv)
        for layer_group, value in enumerate(
            entry_values.pack(stored_form(entry), config.group_bytes, checksum)
        ):
            vandal.client.hset(vandal.entry(info.key), layer_group, value)
        answer = engine.answer(question(0), [A], max_new_tokens=4)
        assert answer.token_ids == wanted and answer.reuse.missed_chunks == 1


@pytest.mark.parametrize("wrong", [b"abc", b"\xff\xfe"])
def test_names_and_types_that_are_no_entries_do_no_harm(
    config: RedisConfig, vandal: Vandal, wrong: bytes
) -> None:
    with redis_store(config) as store:
        store.durable.put(make_entry(1))
        name = vandal.entry(make_entry(1).info.key)
        vandal.client.set(name.encode()[:-64] + wrong, b"x")
        vandal.client.delete(name)
        vandal.client.set(name, wrong)  # of another type
        assert hit(store, 1) is None
        store.put(make_entry(1))
        store.flush()
        assert list(store.contents.infos()) == []


def test_an_answer_without_end_is_cut_off() -> None:
    """A server that announces 4 GB and sends them as fast as it can, without a pause that a timeout
    could see.
    """
    sent = 0
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            nonlocal sent
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"$4000000000\r\n")
                while True:
                    sent += connection.send(bytes(1024**2))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = Client(
            RedisConfig(url=f"redis://{LOOPBACK}:{listener.getsockname()[1]}/0", timeout_s=30.0)
        )
        with pytest.raises(RemoteError, match="more than"), client.call(answer_bytes=1024**2):
            client.client.get("x")
        client.close()
        thread.join(60)
    assert sent < 64 * 1024**2


# Conversations


def test_a_manifest_under_another_name_is_not_read(engine: Engine, vandal: Vandal) -> None:
    ask(engine, engine.session("other"), 1)
    vandal.plant("s", vandal.manifest("other"))
    assert engine.session("s").turns == 0
    assert any(
        "another session" in note for note in ask(engine, engine.session("s"), 2).reuse.notes
    )


def test_a_manifest_of_another_tenant_is_not_read(
    tmp_path: Path, config: RedisConfig, vandal: Vandal
) -> None:
    with engine_at(tmp_path / "a", session=SHARED, redis=config, tenant="a") as one:
        ask(one, one.session("s"), 0)
        data = vandal.manifest("s")
        vandal.client.delete(vandal.name("sessions:*:m:s"))
    with engine_at(tmp_path / "b", session=SHARED, redis=config, tenant="b") as other:
        ask(other, other.session("s"), 1)
        vandal.plant("s", data)
        assert other.session("s").turns == 0
        assert any(
            "another tenant" in note for note in ask(other, other.session("s"), 2).reuse.notes
        )


def test_a_replayed_older_state_is_named_in_the_report(
    engine: Engine, vandal: Vandal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It verifies, and it may be a restored backup: it is used, and the report says that it is
    older.
    """
    monkeypatch.setattr("ragkv.cluster.redis_session_storage.CLOCK_SKEW_S", 0.0)
    old = vandal.manifest("s")
    time.sleep(0.01)
    ask(engine, engine.session("s"), 1)
    assert ask(engine, engine.session("s"), 2).reuse.notes == ()
    vandal.plant("s", old)
    assert any(
        "older than it was" in note for note in ask(engine, engine.session("s"), 3).reuse.notes
    )
    assert engine.session("s").turns == 2


def test_a_huge_manifest_is_not_fetched(
    tmp_path: Path, redis_server: RedisServer, config: RedisConfig, vandal: Vandal
) -> None:
    with Proxy((LOOPBACK, redis_server.port)) as proxy:
        config = replace(config, url=f"redis://{LOOPBACK}:{proxy.port}/0")
        with engine_at(tmp_path, session=SHARED, redis=config) as engine:
            ask(engine, engine.session("s"), 0)
            vandal.plant("s", bytes(100 * 1024**2))
            before = proxy.answered_bytes
            assert engine.session("s").turns == 0
            assert proxy.answered_bytes - before < 2 * 1024**2


FORGED: list[Any] = [
    b"",
    b"\xff\n\xff\n\xff",
    b"[" * 100_000,
    {"turns": 1},
    {"histories": [[0, [[0, 0, 10**9, None]], [], 0, []]]},
    {"histories": [[0, [[0, -5, 3, None]], [], 0, []]]},
    {"histories": [[0, [], [10**15], 0, []]]},
    {"histories": [[0, [], [1, 2, 3], 0, [["question", -7, 0, ""]]]]},
    {"blocks": [["c", "p", "f", [10**9], 0]]},
    {"blocks": "x"},
]


@pytest.mark.parametrize("config", ["without a secret"], indirect=True)
@pytest.mark.parametrize("forged", FORGED, ids=lambda value: str(value)[:40])
def test_a_forged_manifest_fails_no_request(engine: Engine, vandal: Vandal, forged: Any) -> None:
    """Without a secret anyone who can write to the server can make one with the right checksum."""
    data = forged
    if isinstance(forged, dict):
        header, summary, body = vandal.manifest("s").decode().splitlines()
        rest = f"{summary}\n{json.dumps({**json.loads(body), **forged})}\n".encode()
        checked = {**json.loads(header), "checksum": manifest._checksum(rest)}
        data = f"{json.dumps(checked)}\n".encode() + rest
    vandal.plant("s", data)
    assert ask(engine, engine.session("s"), 1).token_ids
    is_full_prefill(engine, engine.session("s"), 2, ratio=1.0)


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"[" * 100_000,
        b'{"session_id": 5}',
        b'{"session_id": "\\ud800", "turns": "x"}',
        b"\xff",
    ],
)
def test_lists_and_deletions_survive_forged_rows(
    engine: Engine, vandal: Vandal, row: bytes
) -> None:
    summaries = vandal.name("sessions:*:summaries")
    vandal.client.hset(summaries, mapping={row: row})
    vandal.client.xadd(summaries.replace("summaries", "deletions"), {"keys": row, "by": "attacker"})
    time.sleep(0.1)
    assert [info.session_id for info in engine.sessions.list()] == ["s"]
    assert "s" in engine.sessions.ids()
    is_full_prefill(engine, engine.session("s"), 1, ratio=1.0)


# Tenants


def test_no_request_of_a_tenant_asks_for_a_key_of_another_tenant(
    tmp_path: Path, config: RedisConfig
) -> None:
    """Both hold the same chunks and conversations. What a lookup costs depends on the tenant's own
    keys alone.
    """
    touched = {
        tenant: _names(tmp_path / tenant, replace(config, prefix="p"), tenant)
        for tenant in ("a", "b")
    }
    assert touched["a"] and touched["b"] and not touched["a"] & touched["b"]


def _names(folder: Path, config: RedisConfig, tenant: str) -> set[str]:
    """Every name on the server that the commands of one tenant mention."""
    seen: list[str] = []
    with Client(config).client.monitor() as monitor:
        with engine_at(folder, session=SHARED, redis=config, tenant=tenant) as engine:
            engine.entries.encode([A, B])
            ask(engine, engine.session("s"), 0)
            engine.answer(question(1), [A, B], session=engine.session("s"), max_new_tokens=2)
            engine.entries.delete([B])
            engine.session("s").delete()
        Client(config).client.echo("the end of the test")
        for command in monitor.listen():
            if "the end of the test" in command["command"]:
                break
            seen.append(command["command"])
    words = {
        word.strip('"')
        for command in seen
        for word in command.split()
        if word.startswith(config.prefix + ":")
    }
    # the pattern of the count has the tenant's own prefix
    return {word for word in words if "*" not in word}
