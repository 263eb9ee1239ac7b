"""Conversations on any replica: engines that share only the weights and a Redis server, which is
started here.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine, Session
from ragkv.cluster.redis_session_storage import RedisSessionStorage
from ragkv.config import RedisConfig
from ragkv.errors import InputError, SessionConflictError, SessionUnavailableError
from ragkv.store.entry import EntryKey
from ragkv.types import TokenEvent
from tests.cluster.helpers import unique_prefix
from tests.cluster.servers import RedisServer
from tests.engine.helpers import A, B
from tests.scheduling.helpers import together, until
from tests.sessions.helpers import (
    ask,
    carry_on,
    engine_at,
    is_full_prefill,
    question,
    talk,
    with_kv,
)

pytestmark = pytest.mark.enable_socket


@pytest.fixture
def config(redis_server: RedisServer) -> RedisConfig:
    return RedisConfig(
        url=f"unix://{redis_server.socket}", prefix=unique_prefix(), ttl_s=None, timeout_s=10.0
    )


@contextmanager
def replicas(
    folder: Path, config: RedisConfig, count: int, session: dict[str, Any] | None = None
) -> Iterator[list[Engine]]:
    """Several engines, each with its own directory."""
    with ExitStack() as stack:
        shared = {"shared": True, **(session or {})}
        folders = [folder / str(number) for number in range(count)]
        yield [stack.enter_context(engine_at(one, session=shared, redis=config)) for one in folders]


def test_a_conversation_spread_over_replicas_equals_one_on_a_single_replica(
    tmp_path: Path, config: RedisConfig
) -> None:
    one = [
        prefill.token_ids.tolist()
        for prefill in carry_on(tmp_path / "one", "llama", turns=8, restarts=set())
    ]
    with replicas(tmp_path, config, 3) as engines:
        for turn in range(8):
            engine = engines[turn * turn % 3]
            session = engine.session("s")
            assert session.turns == turn
            assert is_full_prefill(engine, session, turn, ratio=1.0).token_ids.tolist() == one[turn]
            ask(engine, session, turn, ratio=1.0)


def test_a_replica_reads_blocks_of_another_replica_from_the_shared_tier(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        talk(here, turns=3)
        here.flush()
        prefill = is_full_prefill(there, there.session("s"), 3)
        assert prefill.reuse.exact == 1 + with_kv(there.session("s")) > 20
        assert prefill.reuse.bytes_by_tier.get("redis", 0) > 0


def test_the_second_of_two_concurrent_turns_gets_an_error_and_the_first_is_kept(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        ask(here, here.session("s"), 0)
        stale = there.stream(
            question(1), session=there.session("s"), max_new_tokens=4, min_new_tokens=4
        )
        assert isinstance(next(stale), TokenEvent)  # its turn has read the state
        ask(here, here.session("s"), 2)
        won = here.session("s").token_ids
        with pytest.raises(SessionConflictError, match="Ask again"):
            list(stale)
        assert there.session("s").token_ids == here.session("s").token_ids == won
        ask(there, there.session("s"), 1)  # asks again, with the newest state
        assert here.session("s").turns == 3
        is_full_prefill(here, here.session("s"), 5)


def test_a_state_too_large_to_be_read_again_is_refused_and_the_one_before_is_kept(
    tmp_path: Path, config: RedisConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        ids = talk(here, turns=1).token_ids
        monkeypatch.setattr("ragkv.cluster.redis_session_storage.MANIFEST_BYTES", 100)
        with pytest.raises(InputError, match="at most"):
            ask(here, here.session("s"), 1)
        monkeypatch.undo()
        assert here.session("s").token_ids == there.session("s").token_ids == ids


def test_concurrent_replicas_lose_no_turn(tmp_path: Path, config: RedisConfig) -> None:
    """Three replicas ask four times each, and repeat a turn after a conflict: twelve turns."""
    conflicts: list[int] = []

    def turns(engine: Engine, first: int) -> None:
        for number in range(4):
            while True:
                try:
                    ask(engine, engine.session("s"), first + number)
                    break
                except SessionConflictError:
                    conflicts.append(first)

    with replicas(tmp_path, config, 3) as engines:
        together([partial(turns, engine, 10 * number) for number, engine in enumerate(engines)])
        history = list(engines[0].session("s").token_ids)
        assert engines[1].session("s").turns == 12
        asked = [question(10 * n + k) for n in range(3) for k in range(4)]
        found = {
            tuple(q): sum(history[i : i + len(q)] == q for i in range(len(history))) for q in asked
        }
        assert set(found.values()) == {1}


def test_a_turn_is_saved_before_its_answer_is_complete(tmp_path: Path, config: RedisConfig) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        for event in here.stream(
            question(0), session=here.session("s"), max_new_tokens=2, min_new_tokens=2
        ):
            expected = 0 if isinstance(event, TokenEvent) else 1
            assert there.session("s").turns == expected


def test_deleting_a_conversation_deletes_its_blocks_on_every_replica(
    tmp_path: Path, config: RedisConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.cluster.shared_deletions.POLL_S", 0.05)
    with replicas(tmp_path, config, 2) as (here, there):
        for turn in range(2):
            ask(here, here.session("s"), turn)
            ask(there, there.session("s"), 2 + turn)
        kept = there.session("kept")
        ask(there, kept, 7)
        for engine in (here, there):
            engine.flush()
        held = there.session("s")
        here.session("s").delete()
        assert held.session_id not in [info.session_id for info in there.sessions.list()]
        assert there.session("s").turns == 0
        keys = keys_of(there, kept)
        until(lambda: all(blocks_of(engine) <= keys for engine in (here, there)))
        assert blocks_of(there) == keys
        is_full_prefill(there, kept, 8)


def test_documents_deleted_on_one_replica_are_deleted_on_all(
    tmp_path: Path, config: RedisConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.cluster.shared_deletions.POLL_S", 0.05)
    with replicas(tmp_path, config, 2) as (here, there):
        for engine in (here, there):
            engine.entries.encode([A, B])
        here.entries.delete([A])
        # stored again by the replica that deleted it: its own announcement must not delete it
        here.entries.encode([A])
        here.entries.delete([B])
        # What is left is A, in memory and on disk, if it was not deleted together with the first.
        until(lambda: sum(tier.entries for tier in there.stats().store.tiers[:2]) <= 2)
        time.sleep(0.3)
        assert [tier.entries for tier in here.stats().store.tiers[:2]] == [1, 1]


def test_documents_deleted_without_the_server_are_deleted_on_all_once_it_is_back(
    tmp_path: Path, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that deleted them was closed before it could tell the others, and is
    opened again.
    """
    monkeypatch.setattr("ragkv.cluster.shared_deletions.POLL_S", 0.05)
    config = RedisConfig(url=own_redis.url, prefix=unique_prefix(), timeout_s=5.0)
    with replicas(tmp_path / "there", config, 1) as (there,):
        there.entries.encode([A, B])
        with replicas(tmp_path / "here", config, 1) as (here,):
            here.entries.encode([A, B])
            own_redis.kill()
            here.entries.delete([A])
        with replicas(tmp_path / "here", config, 1):
            own_redis.start()
            (deleted, kept), disk = there.entries.keys([A, B]), there.parts.store.tiers[1]
            until(lambda: not disk.contains(deleted), 60)
            assert disk.contains(kept)


def test_blocks_of_a_turn_that_was_killed_are_deleted_and_those_of_a_turn_under_way_are_not(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 1) as (engine,):
        ask(engine, engine.session("s"), 0)
        stream = engine.stream(
            question(1), session=engine.session("s"), max_new_tokens=12, min_new_tokens=12
        )
        for _ in range(10):
            next(stream)  # its turn has saved a block
        engine.flush()
        history = keys_of(engine, engine.session("s"))
        under_way = set(engine.parts.store.contents.block_keys()) - history
        assert under_way and engine.sessions.blocks.delete_orphans() == 0
        list(stream)
        engine.flush()
        history = keys_of(engine, engine.session("s"))
        assert under_way <= history
        assert engine.sessions.blocks.delete_orphans() == 0
        shared = _shared(engine)
        shared._server.client.delete(*shared._keys)  # as if no turn had ever ended
        assert engine.sessions.blocks.delete_orphans() > 0
        engine.flush()
        assert engine.parts.store.contents.block_keys() == []


def test_a_conversation_deleted_during_a_turn_stays_deleted(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        ask(here, here.session("s"), 0)
        stream = there.stream(
            question(1), session=there.session("s"), max_new_tokens=4, min_new_tokens=4
        )
        next(stream)
        here.session("s").delete()
        with pytest.raises(SessionConflictError):
            list(stream)
        assert here.session("s").turns == there.session("s").turns == 0


def test_rewind_reset_discard_and_fork_reach_every_replica(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        talk(here, turns=3)
        there.session("s").rewind()
        assert here.session("s").turns == 2
        other = there.session("s").fork("t")
        assert here.session("t").token_ids == other.token_ids
        with pytest.raises(InputError, match="already"):
            here.session("s").fork("t")
        assert here.session("t").discard([(0, 3)]) == 3
        is_full_prefill(there, there.session("t"), 5, ratio=1.0)
        here.session("s").reset()
        assert there.session("s").turns == 0
        assert there.sessions.ids() == ("t",)


def test_an_idle_conversation_is_deleted_on_every_replica(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 2, {"ttl_s": 600.0}) as (here, there):
        ask(here, here.session("s"), 0)
        ask(here, here.session("t", ttl_s=6000.0), 1)
        assert there.session("s").turns == 1
        for engine in (here, there):
            engine.sessions.clock = lambda: time.time() + 700.0
        assert there.session("s").turns == here.session("s").turns == 0
        assert there.session("t").turns == 1


def test_a_ttl_given_on_another_replica_applies_from_its_next_turn(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        ask(here, here.session("s"), 0)
        session = there.session("s", ttl_s=60.0)
        assert (session.turns, session.state.ttl_s) == (1, 60.0)
        ask(there, session, 1)
        assert here.session("s").state.ttl_s == 60.0


def test_tenants_and_models_share_a_server_and_nothing_else(
    tmp_path: Path, config: RedisConfig
) -> None:
    shared = {"shared": True}
    with (
        engine_at(tmp_path / "a", session=shared, redis=config) as one,
        engine_at(tmp_path / "b", session=shared, redis=config, tenant="other") as tenant,
        engine_at(tmp_path / "c", "qwen2", session=shared, redis=config) as model,
    ):
        ask(one, one.session("s"), 0)
        for engine in (tenant, model):
            assert engine.session("s").turns == 0 and engine.sessions.ids() == ()
            ask(engine, engine.session("s"), 3)
        assert one.session("s").turns == 1
        assert question(0)[0] in one.session("s").token_ids


def test_no_turn_is_answered_without_the_server(tmp_path: Path, own_redis: RedisServer) -> None:
    config = RedisConfig(url=own_redis.url, prefix=unique_prefix(), timeout_s=5.0)
    with replicas(tmp_path, config, 1) as (engine,):
        session = engine.session("s")
        ask(engine, session, 0)
        stream = engine.stream(question(1), session=session, max_new_tokens=4, min_new_tokens=4)
        next(stream)
        own_redis.kill()
        with pytest.raises(SessionUnavailableError, match="ask again"):
            list(stream)  # computed, but no replica could find it
        assert session.state.history.blocks and session.turns == 1
        with pytest.raises(SessionUnavailableError):
            engine.session("s")
        # without a session it needs no server
        assert engine.answer(question(2), [A, B], max_new_tokens=2).token_ids
        own_redis.start()  # the server kept everything in memory, so it is empty now
        until(lambda: engine.sessions.storage.stats().answers)  # a probe finds that out
        assert engine.session("s").turns == 0


def test_a_conversation_with_a_damaged_shared_manifest_starts_empty_and_says_so(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 2) as (here, there):
        ask(here, here.session("s"), 0)
        _overwrite(there, "s", lambda data: data.replace(b'"turns"', b'"turms"', 1))
        assert there.session("s").turns == 0
        notes = ask(there, there.session("s"), 1).reuse.notes
        assert any("damaged" in note for note in notes)
        assert here.session("s").turns == 1


def test_a_shared_manifest_of_another_version_is_left_alone(
    tmp_path: Path, config: RedisConfig
) -> None:
    with replicas(tmp_path, config, 1) as (engine,):
        ask(engine, engine.session("s"), 0)
        _overwrite(engine, "s", lambda data: data.replace(b'"version": 1', b'"version": 9', 1))
        with pytest.raises(SessionUnavailableError, match="another version"):
            engine.session("s")


def test_a_manifest_written_without_the_secret_is_not_read(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARED_SECRET", "0123456789abcdef")
    config = RedisConfig(
        f"unix://{redis_server.socket}",
        unique_prefix(),
        None,
        10.0,
        secret_variable="SHARED_SECRET",
    )
    with replicas(tmp_path, config, 1) as (engine,):
        ask(engine, engine.session("s"), 0)
        shared = _shared(engine)
        shared._secret = "another"
        found = shared.load("s", None)
        assert found is not None and found.state is None


def keys_of(engine: Engine, session: Session) -> set[EntryKey]:
    return {block.key(engine.sessions.blocks.writer.base) for block in session.state.history.blocks}


def blocks_of(engine: Engine) -> set[EntryKey]:
    return {info.key for info in engine.parts.store.contents.infos() if info.group}


def _shared(engine: Engine) -> RedisSessionStorage:
    assert isinstance(engine.sessions.storage, RedisSessionStorage)
    return engine.sessions.storage


def _overwrite(engine: Engine, session_id: str, change: Any) -> None:
    """Change a manifest on the server like a write would, without telling any replica."""
    shared = _shared(engine)
    client = shared._server.client
    key = shared._root + session_id
    before = client.hget(key, "data")
    assert change(before) != before
    client.hset(key, mapping={"data": change(before), "edition": "changed"})
