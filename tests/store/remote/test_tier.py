"""The remote tier alone: what its leases keep in memory."""

import pytest

from ragkv.config import StoreConfig
from ragkv.store.remote import open_remote
from ragkv.store.remote.lease import RemoteLease
from tests.store.entries import IDENTITY, ids_of, make_entry, read_all, same

from .helpers import redis_config
from .servers import LOOPBACK, RedisServer

pytestmark = pytest.mark.allow_hosts([LOOPBACK])


def test_a_lease_outlives_the_deletion_of_its_entry_and_reserves_no_cache_that_is_not_there(
    redis_server: RedisServer,
) -> None:
    config = StoreConfig(redis=redis_config(redis_server, timeout_s=10.0), write_buffer_bytes=0)  # no read cache
    (tier,) = open_remote(config)
    assert tier.put(make_entry(1))
    lease = tier.lease(IDENTITY, ids_of(1))
    assert lease is not None
    with lease:
        tier.delete(make_entry(1).info.key)
        assert same(read_all(lease), make_entry(1))
    assert not tier._reader.reserve_read_cache(1)
    tier.close()


def test_an_entry_is_deleted_although_its_lease_is_closed_at_that_moment(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tier,) = open_remote(StoreConfig(redis=redis_config(redis_server, timeout_s=10.0)))
    assert tier.put(make_entry(1))
    lease = tier.lease(IDENTITY, ids_of(1))
    assert isinstance(lease, RemoteLease)
    fetch_all = lease.fetch_all
    monkeypatch.setattr(lease, "fetch_all", lambda: (lease.close(), fetch_all()))
    assert tier.delete(make_entry(1).info.key)
    assert not tier.contains(make_entry(1).info.key)
    tier.close()
