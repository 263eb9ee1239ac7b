"""Accounting on the Redis server: bounded, correct with several writers, corrected by audits; tenants; time to live."""

import threading
import time
from typing import Any

import pytest

from ragkv.config import RedisConfig
from ragkv.store import Store, TierKind
from ragkv.store.remote import RemoteTier
from tests.store.entries import make_entry, other_identities

from .helpers import hit, redis_config, redis_store, redis_tier_of
from .servers import LOOPBACK, RedisServer

pytestmark = pytest.mark.allow_hosts([LOOPBACK])

VALUE_BYTES = 8448  # A test entry has so many bytes in one value.


def counted(store: Store) -> tuple[int, int]:
    stats = redis_tier_of(store).stats()
    return stats.entries, stats.used_bytes


class TestAudit:
    @pytest.fixture
    def config(self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisConfig:
        """Its tiers audit only when a test does."""
        monkeypatch.setattr(RemoteTier, "_maintain", lambda _: None)
        return redis_config(redis_server, timeout_s=10.0, group_bytes=1)

    def test_an_audit_forgets_what_is_gone_and_enters_what_the_accounting_lost(self, config: RedisConfig) -> None:
        with redis_store(config) as store:
            for number in range(4):
                store.put_durably(make_entry(number))
            connector: Any = redis_tier_of(store)._connector
            client, (sizes, uses) = connector._client, connector._accounting
            _, whole = counted(store)
            client.delete(*client.keys(f"*{make_entry(0).info.key.to_text()}:*"))
            client.zadd(uses, {make_entry(0).info.key.to_text(): 0})  # long ago: no replica is writing it now
            client.delete(connector._audited)
            connector.audit()
            assert counted(store) == (3, whole * 3 // 4)
            client.delete(sizes, uses, connector._audited)
            assert counted(store)[0] == 0
            connector.audit()
            assert counted(store) == (3, whole * 3 // 4)

    def test_an_audit_does_nothing_once_stopped_or_while_another_replicas_is_recent(self, config: RedisConfig) -> None:
        with redis_store(config) as store:
            store.put_durably(make_entry(1))
            connector: Any = redis_tier_of(store)._connector
            client = connector._client
            client.delete(*connector._accounting, connector._audited)
            connector.audit(lambda: True)
            assert counted(store)[0] == 0
            connector.audit()
            assert counted(store)[0] == 0

    def test_an_audit_does_not_count_an_entry_that_was_just_deleted(self, config: RedisConfig) -> None:
        with redis_store(config) as store:
            connector: Any = redis_tier_of(store)._connector
            store.put_durably(make_entry(1))
            listed = list(connector._present())
            store.delete(make_entry(1).info.key)
            connector._present = lambda: iter(listed)
            connector._client.delete(connector._audited)
            connector.audit()
            assert connector._client.hkeys(connector._accounting[0]) == [b""]
            assert store.put_durably(make_entry(1)) and hit(store, 1) is TierKind.REDIS

    def test_a_row_of_zero_bytes_is_replaced(self, config: RedisConfig) -> None:
        with redis_store(config) as store:
            connector: Any = redis_tier_of(store)._connector
            connector._client.hset(
                connector._accounting[0], make_entry(1).info.key.to_text(), "0:0"
            )  # of an earlier version
            assert store.put_durably(make_entry(1)) and hit(store, 1) is TierKind.REDIS
            assert counted(store)[0] == 1


def test_two_concurrent_writers_keep_one_correct_count_within_the_bound(redis_server: RedisServer) -> None:
    config = redis_config(redis_server, timeout_s=10.0, max_bytes=5 * VALUE_BYTES)
    with redis_store(config) as one, redis_store(config) as two:

        def write(store: Store, numbers: range) -> None:
            for number in numbers:
                redis_tier_of(store).put(make_entry(number))
                redis_tier_of(store).delete(make_entry(number - 3).info.key)

        threads = [
            threading.Thread(target=write, args=(store, range(start, start + 25)))
            for store, start in ((one, 0), (two, 10))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = len(list(redis_tier_of(one).infos()))
        assert counted(one) == counted(two) == (held, VALUE_BYTES * held)
        assert held <= 5


def test_an_entry_expires_when_unused_for_its_time_to_live_and_use_prolongs_it(redis_server: RedisServer) -> None:
    with redis_store(redis_config(redis_server, timeout_s=10.0, ttl_s=1.0)) as store:
        store.put_durably(make_entry(1))
        store.put_durably(make_entry(2))
        end = time.monotonic() + 1.6
        while time.monotonic() < end:
            assert hit(store, 1) is TierKind.REDIS
            time.sleep(0.1)
        assert hit(store, 2) is None


def test_tenants_see_neither_the_entries_nor_the_bytes_of_each_other(redis_server: RedisServer) -> None:
    tenant = dict(other_identities())["tenant"]
    config = redis_config(redis_server, timeout_s=10.0)
    with redis_store(config) as store, redis_store(config, tenant=tenant.tenant) as other:
        store.put_durably(make_entry(1))
        other.put_durably(make_entry(2, identity=tenant))
        ours, theirs = redis_tier_of(store), redis_tier_of(other)
        assert [info.key for info in ours.infos()] == [make_entry(1).info.key]
        assert [info.key for info in theirs.infos()] == [make_entry(2, identity=tenant).info.key]
        assert ours.stats().entries == theirs.stats().entries == 1
        assert not theirs.contains(make_entry(1).info.key)
