"""Memory, disk, Redis and S3 as one store: what sinks, what climbs, what deletion reaches, and who waits for whom."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragkv.config import RedisConfig, StoreConfig
from ragkv.errors import ConfigError, RemoteError
from ragkv.store import HintedEntry, PrefetchHint, Store, TierKind
from ragkv.store.remote import RemoteTier
from ragkv.store.remote.tombstones import Tombstones
from ragkv.testing.faulty_proxy import Proxy

from ..entries import IDENTITY, ids_of, make_entry, other_identities, read_all, same
from .helpers import redis_config, s3_config, unique_prefix
from .servers import LOOPBACK, RedisServer, S3Server

pytestmark = pytest.mark.allow_hosts([LOOPBACK])

KINDS = (TierKind.MEMORY, TierKind.DISK, TierKind.REDIS, TierKind.S3)


def settings(directory: Path | None, **changes: Any) -> StoreConfig:
    return StoreConfig(**{"directory": None if directory is None else str(directory), "memory_bytes": 10**6, **changes})


@pytest.fixture
def shared(redis_server: RedisServer, s3_server: S3Server) -> dict[str, Any]:
    """What replicas have in common."""
    return {"redis": redis_config(redis_server, timeout_s=10.0), "s3": s3_config(s3_server)}


def holders(store: Store, number: int) -> set[TierKind]:
    key = make_entry(number).info.key
    return {tier.kind for tier in store._tiers if tier.contains(key)}


def hit(store: Store, number: int) -> TierKind | None:
    """Where a request would read it, and the right bytes; what it sets off is done when this returns."""
    lease = store.lease(IDENTITY, ids_of(number))
    if lease is None:
        return None
    with lease:
        kind = lease.kind
        assert same(read_all(lease), make_entry(number))
    store.flush()
    return kind


def far(store: Store) -> RemoteTier:
    (tier,) = (tier for tier in store._tiers if tier.kind is TierKind.REDIS)
    assert isinstance(tier, RemoteTier)
    return tier


def until(condition: Any, patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


def test_what_is_put_sinks_to_every_tier(shared: dict[str, Any], tmp_path: Path) -> None:
    with Store.open(settings(tmp_path, **shared)) as store:
        store.put(make_entry(1))
        store.flush()
        assert holders(store, 1) == set(KINDS)
        assert [tier.kind for tier in store.stats().tiers] == list(KINDS)
        assert store.stats().dropped_writes == 0


@pytest.mark.parametrize("below", [TierKind.REDIS, TierKind.S3])
def test_a_hit_far_away_climbs_to_every_tier_above(shared: dict[str, Any], tmp_path: Path, below: TierKind) -> None:
    with Store.open(settings(tmp_path / "a", **shared)) as store:
        store.put_durably(make_entry(1))
        if below is TierKind.S3:
            assert far(store).delete(make_entry(1).info.key)
    with Store.open(settings(tmp_path / "b", **shared)) as other:
        assert hit(other, 1) is below
        assert holders(other, 1) == set(KINDS)
        assert hit(other, 1) is TierKind.MEMORY


def test_what_was_read_is_not_fetched_again_for_the_copy(redis_server: RedisServer, tmp_path: Path) -> None:
    config = redis_config(redis_server, timeout_s=10.0, group_bytes=1)
    with Store.open(settings(None, redis=config)) as store:
        store.put_durably(make_entry(1))
    proxy = Proxy((LOOPBACK, redis_server.port))
    through = replace(config, url=f"redis://{LOOPBACK}:{proxy.port}/0")
    with Store.open(settings(tmp_path, redis=through)) as store:
        lease = store.lease(IDENTITY, ids_of(1))
        assert lease is not None
        read_all(lease)
        before = proxy.answered_bytes
        lease.close()
        store.flush()
        assert holders(store, 1) == {TierKind.MEMORY, TierKind.DISK, TierKind.REDIS}
        assert proxy.answered_bytes - before < 2000  # no layer came again
    proxy.close()


def test_who_waits_finds_it_in_memory(shared: dict[str, Any], tmp_path: Path) -> None:
    with Store.open(settings(tmp_path / "a", **shared)) as store:
        store.put_durably(make_entry(1))
    with Store.open(settings(tmp_path / "b", **shared)) as other:
        demand = PrefetchHint((HintedEntry(IDENTITY, tuple(ids_of(1)), make_entry(1).size_bytes),))
        other.queued(demand)
        until(lambda: TierKind.MEMORY in holders(other, 1))
        other.started(demand)
        assert hit(other, 1) is TierKind.MEMORY
        other.left(demand)
        assert other.stats().prefetched == 1


def test_lookups_of_a_request_that_starts_go_out_together(redis_server: RedisServer) -> None:
    """Twenty lookups through 100 ms of network each way, in far less than twenty journeys."""
    config = redis_config(redis_server, timeout_s=10.0)
    with Store.open(settings(None, redis=config)) as store:
        for number in range(20):
            store.put_durably(make_entry(number))
    proxy = Proxy((LOOPBACK, redis_server.port), latency_s=0.1)
    through = replace(config, url=f"redis://{LOOPBACK}:{proxy.port}/0")
    with Store.open(settings(None, redis=through, prefetch=False)) as store:
        assert far(store).contains(make_entry(1).info.key)  # connected
        demand = PrefetchHint(tuple(HintedEntry(IDENTITY, tuple(ids_of(number)), 1) for number in range(20)))
        began = time.monotonic()
        store.queued(demand)
        store.started(demand)
        leases = [store.lease(IDENTITY, ids_of(number)) for number in range(20)]
        took_s = time.monotonic() - began
        assert all(lease is not None for lease in leases)
        assert took_s < 10 * 0.2
        for lease in leases:
            lease.close()  # type: ignore[union-attr]
        store.left(demand)
    proxy.close()


def test_deletion_reaches_shared_storage_and_what_is_on_its_way(shared: dict[str, Any], tmp_path: Path) -> None:
    with Store.open(settings(tmp_path, **shared)) as store:
        store.put(make_entry(1))
        assert store.delete(IDENTITY, ids_of(1))
        store.flush()
        assert holders(store, 1) == set()
        assert hit(store, 1) is None
        assert [tier.used_bytes for tier in store.stats().tiers] == [0, 0, 0, 0]


def test_a_lease_closed_after_the_deletion_brings_nothing_back(shared: dict[str, Any], tmp_path: Path) -> None:
    with Store.open(settings(tmp_path / "a", **shared)) as store:
        store.put_durably(make_entry(1))
    with Store.open(settings(tmp_path / "b", **shared)) as other:
        lease = other.lease(IDENTITY, ids_of(1))
        other.delete(IDENTITY, ids_of(1))
        lease.close()  # type: ignore[union-attr]
        other.flush()
        assert holders(other, 1) == set()


class Behind:
    """A store behind a proxy."""

    def __init__(self, server: RedisServer, directory: Path | None, **changes: Any) -> None:
        self.proxy = Proxy((LOOPBACK, server.port))
        url = f"redis://{LOOPBACK}:{self.proxy.port}/0"
        self.config = RedisConfig(url=url, prefix=unique_prefix(), timeout_s=2.0, **changes)
        self.settings = settings(directory, redis=self.config)
        self.store = Store.open(self.settings)

    def close(self) -> None:
        self.store.close()
        self.proxy.close()


@pytest.fixture
def behind(redis_server: RedisServer, tmp_path: Path) -> Iterator[Behind]:
    made = Behind(redis_server, tmp_path / "near")
    yield made
    made.close()


def test_a_deletion_the_remote_did_not_hear_is_noted_served_no_more_and_done_when_it_answers(
    behind: Behind, redis_server: RedisServer
) -> None:
    behind.store.put_durably(make_entry(1))
    behind.store.put_durably(make_entry(2))
    behind.proxy.refusing = True
    behind.proxy.close_connections()
    behind.store.delete(IDENTITY, ids_of(1))
    assert hit(behind.store, 1) is None
    remote = behind.store.stats().tiers[-1].remote
    assert remote is not None and remote.pending_deletions == 1
    behind.store.close()

    behind.store = Store.open(behind.settings)  # a restart forgets nothing, though the remote is still away
    assert hit(behind.store, 1) is None
    past = replace(behind.config, url=redis_config(redis_server).url)
    with Store.open(settings(None, redis=past)) as other:
        assert holders(other, 1) == {TierKind.REDIS}
        behind.proxy.refusing = False
        until(lambda: holders(other, 1) == set())
        assert holders(other, 2) == {TierKind.REDIS}
    until(lambda: behind.store.stats().tiers[-1].remote.pending_deletions == 0)  # type: ignore[union-attr]
    assert behind.store.put_durably(make_entry(1))  # ingested again, it is served again
    assert holders(behind.store, 1) == {TierKind.MEMORY, TierKind.DISK, TierKind.REDIS}


def test_until_a_deletion_is_confirmed_nothing_serves_the_entry_though_the_remote_answers(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(settings(None, memory_bytes=0, redis=redis_config(redis_server, timeout_s=10.0))) as store:
        store.put_durably(make_entry(1))

        def refuse(*_: object) -> bool:
            raise RemoteError("not now")

        connector = far(store)._connector
        monkeypatch.setattr(connector, "delete", refuse)
        assert not store.delete(IDENTITY, ids_of(1))
        assert connector.exists(make_entry(1).info.key)
        assert hit(store, 1) is None
        assert not store.contains(make_entry(1).info.key)
        assert list(store.infos()) == []
        assert not store.put_durably(make_entry(1))  # it would be deleted later
        monkeypatch.undo()


def test_a_remote_that_stalls_delays_neither_puts_nor_the_disk(behind: Behind) -> None:
    assert far(behind.store).put(make_entry(0))
    behind.proxy.stalled = True
    began = time.monotonic()
    for number in range(1, 20):
        behind.store.put(make_entry(number))
    assert time.monotonic() - began < 1.5  # less than one timeout
    lease = behind.store._tiers[2].lease(IDENTITY, ids_of(0))
    assert lease is None  # it stalls
    disk = behind.store._tiers[1]
    until(lambda: all(disk.contains(make_entry(number).info.key) for number in range(1, 20)), 5.0)
    behind.proxy.stalled = False


def test_warming_counts_what_is_near_as_durable_though_the_remote_is_away(behind: Behind) -> None:
    behind.proxy.refusing = True
    behind.proxy.close_connections()
    assert behind.store.put_durably(make_entry(1))
    assert behind.store.is_durable(make_entry(1).info.key)
    assert behind.store.ensure_durable(IDENTITY, ids_of(1))


def test_what_only_one_tier_has_is_spread_to_those_that_lack_it(shared: dict[str, Any], tmp_path: Path) -> None:
    with Store.open(settings(tmp_path, **shared)) as store:
        store.put_durably(make_entry(1))
        for kind in (TierKind.REDIS, TierKind.S3):
            next(tier for tier in store._tiers if tier.kind is kind).delete(make_entry(1).info.key)
        assert store.ensure_durable(IDENTITY, ids_of(1))
        assert holders(store, 1) == set(KINDS)
        assert not store.ensure_durable(IDENTITY, ids_of(2))


def test_tenants_see_neither_each_others_entries_nor_bytes(redis_server: RedisServer) -> None:
    tenant = dict(other_identities())["tenant"]
    config = redis_config(redis_server, timeout_s=10.0)
    with (
        Store.open(settings(None, redis=config)) as store,
        Store.open(settings(None, redis=config, tenant=tenant.tenant)) as other,
    ):
        store.put_durably(make_entry(1))
        other.put_durably(make_entry(2, identity=tenant))
        assert [info.key for info in far(store).infos()] == [make_entry(1).info.key]
        assert [info.key for info in far(other).infos()] == [make_entry(2, identity=tenant).info.key]
        assert far(store).stats().entries == far(other).stats().entries == 1
        assert not far(other).contains(make_entry(1).info.key)


def test_an_audit_strikes_off_what_is_gone_and_takes_in_what_is_in_no_book(redis_server: RedisServer) -> None:
    with Store.open(settings(None, redis=redis_config(redis_server, timeout_s=10.0, group_bytes=1))) as store:
        for number in range(4):
            store.put_durably(make_entry(number))
        connector: Any = far(store)._connector
        client, (sizes, uses) = connector._client, connector._accounting
        whole = far(store).stats().used_bytes
        client.delete(*client.keys(f"*{make_entry(0).info.key}:*"))
        client.zadd(uses, {make_entry(0).info.key: 0})  # long ago: nobody is writing it now
        client.delete(connector._audited)
        connector.audit()
        assert (far(store).stats().entries, far(store).stats().used_bytes) == (3, whole * 3 // 4)
        client.delete(sizes, uses, connector._audited)
        assert far(store).stats().entries == 0
        connector.audit()
        assert (far(store).stats().entries, far(store).stats().used_bytes) == (3, whole * 3 // 4)
        client.delete(sizes, uses)
        connector.audit(lambda: True)
        assert far(store).stats().entries == 0  # it was stopped, and another's turn is not come yet


def test_two_writers_keep_one_count(redis_server: RedisServer) -> None:
    config = redis_config(redis_server, timeout_s=10.0, max_bytes=5 * 4352)
    with Store.open(settings(None, redis=config)) as one, Store.open(settings(None, redis=config)) as two:
        stores = (one, two)

        def write(store: Store, numbers: range) -> None:
            for number in numbers:
                far(store).put(make_entry(number))
                far(store).delete(make_entry(number - 3).info.key)

        threads = [
            threading.Thread(target=write, args=(store, range(start, start + 25)))
            for store, start in zip(stores, (0, 10), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = [info.key for info in far(one).infos()]
        for store in stores:
            stats = far(store).stats()
            assert stats.entries == len(held)
            assert stats.used_bytes == 4352 * len(held) <= stats.capacity_bytes


def test_what_nobody_uses_for_its_time_to_live_goes_and_use_prolongs_it(redis_server: RedisServer) -> None:
    config = redis_config(redis_server, timeout_s=10.0, ttl_s=1.0)
    with Store.open(settings(None, redis=config, memory_bytes=0)) as store:
        store.put_durably(make_entry(1))
        store.put_durably(make_entry(2))
        until_s = time.monotonic() + 1.6
        while time.monotonic() < until_s:
            assert hit(store, 1) is TierKind.REDIS
            time.sleep(0.1)
        assert hit(store, 2) is None


class TestSecret:
    SECRET = "a secret of many characters"

    @pytest.fixture
    def config(self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisConfig:
        monkeypatch.setenv("OUR_SECRET", self.SECRET)
        return redis_config(redis_server, timeout_s=10.0, secret_variable="OUR_SECRET")

    def test_who_knows_it_reads(self, config: RedisConfig) -> None:
        with Store.open(settings(None, redis=config, memory_bytes=0)) as store:
            store.put_durably(make_entry(1))
            assert hit(store, 1) is TierKind.REDIS

    def test_who_does_not_sees_nothing_and_harms_nothing(
        self, config: RedisConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Store.open(settings(None, redis=config, memory_bytes=0)) as store:
            store.put_durably(make_entry(1))
            with Store.open(settings(None, redis=replace(config, secret_variable=None), memory_bytes=0)) as other:
                assert hit(other, 1) is None
            monkeypatch.setenv("OUR_SECRET", "another secret of many characters")
            with Store.open(settings(None, redis=config, memory_bytes=0)) as other:
                assert hit(other, 1) is None
            assert hit(store, 1) is TierKind.REDIS

    def test_values_somebody_else_made_are_refused_though_their_checksums_are_right(self, config: RedisConfig) -> None:
        """The forger can write to the server, knows the format, and not the secret."""
        from ragkv.store.encoded import EncodedEntry
        from ragkv.store.remote import values
        from ragkv.store.remote.values import Digester

        with Store.open(settings(None, redis=config, memory_bytes=0)) as store:
            store.put_durably(make_entry(1))
            forged = make_entry(1)
            forged.kv.zero_()
            connector: Any = far(store)._connector
            for group, value in enumerate(values.pack(EncodedEntry.of(forged), 512 * 1024, Digester())):
                connector._client.set(f"{connector._root}{forged.info.key}:{group}", value)
            assert hit(store, 1) is None

    def test_a_short_or_missing_one_is_refused(self, config: RedisConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OUR_SECRET", "short")
        with pytest.raises(ConfigError, match="OUR_SECRET"):
            Store.open(settings(None, redis=config))


def test_pending_deletions_survive_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "deletions.json"
    noted = Tombstones(path)
    noted.add("a")
    noted.add("b")
    noted.discard("a")
    assert Tombstones(path).pending() == ["b"]
    path.write_text("{broken")
    assert Tombstones(path).pending() == []
