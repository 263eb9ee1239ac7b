"""Entries on the Redis server: what a killed writer leaves, tenants, time to live."""

from typing import Any

import pytest

from ragkv.cluster import RemoteTier
from ragkv.errors import RemoteError
from ragkv.store.tiers import TierKind
from tests.faults import raising
from tests.store.entries import make_entry, other_identities

from .helpers import counted, hit, redis_config, redis_store, redis_tier_of
from .servers import LOOPBACK, RedisServer

pytestmark = pytest.mark.allow_hosts([LOOPBACK])


def test_an_entry_whose_writer_was_killed_is_a_miss_and_expires(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteTier, "_maintain", lambda _: None)  # it would call the server, too
    with redis_store(
        redis_config(redis_server, timeout_s=10.0, ttl_s=None, group_bytes=1)
    ) as store:
        connector: Any = redis_tier_of(store).connector
        name = connector.name_of(make_entry(1).info.key)
        client = connector.client
        fail = raising(RemoteError("not now"))
        groups = iter([connector.call, fail])
        with monkeypatch.context() as patch, pytest.raises(RemoteError):
            patch.setattr(connector, "call", lambda: next(groups, fail)())
            connector.put(make_entry(1).info.key, [b"head", b"layers"])
        assert client.hkeys(name) == [b"1"] and 0 < client.pttl(name) <= 3600 * 1000
        assert hit(store, 1) is None and not store.contains(make_entry(1).info.key)
        assert store.durable.put(make_entry(1)) and hit(store, 1) == TierKind.REDIS
        assert client.pttl(name) == -1


def test_an_entry_expires_when_unused_for_its_time_to_live_and_use_prolongs_it(
    redis_server: RedisServer,
) -> None:
    with redis_store(redis_config(redis_server, timeout_s=10.0, ttl_s=600.0)) as store:
        connector: Any = redis_tier_of(store).connector
        client = connector.client
        names = [connector.name_of(make_entry(number).info.key) for number in (1, 2)]
        for number, name in enumerate(names, 1):
            store.durable.put(make_entry(number))
            assert 0 < client.pttl(name) <= 600_000
            client.pexpire(name, 300_000)  # as if it were 300 s older
        assert hit(store, 1) == TierKind.REDIS
        assert client.pttl(names[0]) > 300_000 >= client.pttl(names[1])


def test_tenants_see_neither_the_entries_nor_the_bytes_of_each_other(
    redis_server: RedisServer,
) -> None:
    tenant = dict(other_identities())["tenant"]
    config = redis_config(redis_server, timeout_s=10.0)
    with redis_store(config) as store, redis_store(config, tenant=tenant.tenant) as other:
        store.durable.put(make_entry(1))
        other.durable.put(make_entry(2, identity=tenant))
        ours = redis_tier_of(store)
        theirs = redis_tier_of(other)
        assert [info.key for info in ours.infos()] == [make_entry(1).info.key]
        assert [info.key for info in theirs.infos()] == [make_entry(2, identity=tenant).info.key]
        assert counted(ours).entries == counted(theirs).entries == 1
        assert not theirs.contains(make_entry(1).info.key)
