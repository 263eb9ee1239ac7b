"""Memory, disk, Redis and S3 as one store: promotion, demotion, deletion, and no waiting for a
remote that stalls.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragkv.config import RedisConfig, StoreConfig
from ragkv.errors import RemoteError
from ragkv.runtime import Closing
from ragkv.store.entry import EntryKey
from ragkv.store.opening import open_store
from ragkv.store.store import Store
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import TierKind
from tests.cluster.faulty_proxy import Proxy
from tests.faults import raising
from tests.scheduling.helpers import begin, until
from tests.store.entries import IDENTITY, hint_of, ids_of, make_entry, read_all

from .helpers import (
    counted,
    hit,
    redis_config,
    redis_store,
    redis_tier_of,
    remote_tier,
    s3_config,
    unique_prefix,
)
from .servers import LOOPBACK, RedisServer, S3Server

pytestmark = pytest.mark.allow_hosts([LOOPBACK])

KINDS = (TierKind.MEMORY, TierKind.DISK, TierKind.REDIS, TierKind.S3)


def store_at(directory: Path | None, **changes: Any) -> Store:
    place = None if directory is None else str(directory)
    return open_store(StoreConfig(**{"directory": place, "memory_bytes": 10**6, **changes}))


@pytest.fixture
def shared(redis_server: RedisServer, s3_server: S3Server) -> dict[str, Any]:
    """The settings that replicas have in common."""
    return {"redis": redis_config(redis_server, timeout_s=10.0), "s3": s3_config(s3_server)}


def holders(store: Store, number: int) -> set[str]:
    key = make_entry(number).info.key
    return {tier.kind for tier in store.tiers if tier.contains(key)}


def test_a_write_is_demoted_to_every_tier(shared: dict[str, Any], tmp_path: Path) -> None:
    with store_at(tmp_path, **shared) as store:
        store.put(make_entry(1))
        store.flush()
        assert holders(store, 1) == set(KINDS)
        assert [tier.kind for tier in store.stats().tiers] == list(KINDS)
        assert store.stats().dropped_writes == 0


@pytest.mark.parametrize("below", [TierKind.REDIS, TierKind.S3])
def test_a_remote_hit_is_promoted_to_every_tier_above(
    shared: dict[str, Any], tmp_path: Path, below: str
) -> None:
    with store_at(tmp_path / "a", **shared) as store:
        store.durable.put(make_entry(1))
        if below == TierKind.S3:
            assert redis_tier_of(store).delete(make_entry(1).info.key)
    with store_at(tmp_path / "b", **shared) as other:
        assert hit(other, 1) is below
        assert holders(other, 1) == set(KINDS)
        assert hit(other, 1) == TierKind.MEMORY


def test_the_promotion_of_an_entry_does_not_fetch_again_what_its_reader_fetched(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    config = redis_config(redis_server, timeout_s=10.0, group_bytes=1)
    with redis_store(config) as store:
        store.durable.put(make_entry(1))
    proxy = Proxy((LOOPBACK, redis_server.port))
    with store_at(
        tmp_path, redis=replace(config, url=f"redis://{LOOPBACK}:{proxy.port}/0")
    ) as store:
        lease = store.lease(IDENTITY, ids_of(1))
        assert lease is not None
        read_all(lease)
        before = proxy.answered_bytes
        lease.close()
        store.flush()
        assert holders(store, 1) == {TierKind.MEMORY, TierKind.DISK, TierKind.REDIS}
        assert proxy.answered_bytes - before < 2000  # no layer came again
    proxy.close()


def test_the_lookups_of_a_request_that_starts_share_one_round_trip(
    redis_server: RedisServer,
) -> None:
    """Twenty lookups through 500 ms of network each way take far less time than twenty
    round trips.
    """
    config = redis_config(redis_server, timeout_s=10.0)
    with redis_store(config) as store:
        for number in range(20):
            store.durable.put(make_entry(number))
    proxy = Proxy((LOOPBACK, redis_server.port), latency_s=0.5)
    through = replace(config, url=f"redis://{LOOPBACK}:{proxy.port}/0")
    with store_at(None, redis=through, prefetch=False) as store:
        assert redis_tier_of(store).contains(make_entry(1).info.key)  # connected
        hint = hint_of(*range(20))
        began = time.monotonic()
        store.prefetcher.queued(hint)
        store.prefetcher.started(hint)
        leases = [store.lease(IDENTITY, ids_of(number)) for number in range(20)]
        assert time.monotonic() - began < 10 * 1.0
        for lease in leases:
            assert lease is not None
            lease.close()
        store.prefetcher.left(hint)
    proxy.close()


def test_deletion_reaches_every_tier_and_the_writes_that_are_queued(
    shared: dict[str, Any], tmp_path: Path
) -> None:
    with store_at(tmp_path, **shared) as store:
        store.put(make_entry(1))
        assert store.delete(make_entry(1).info.key)
        store.flush()
        assert holders(store, 1) == set()
        assert hit(store, 1) is None
        assert [counted(tier).used_bytes for tier in store.tiers] == [0, 0, 0, 0]


def test_an_entry_that_one_tier_lacks_is_copied_there(
    shared: dict[str, Any], tmp_path: Path
) -> None:
    with store_at(tmp_path, **shared) as store:
        store.durable.put(make_entry(1))
        for kind in (TierKind.REDIS, TierKind.S3):
            next(tier for tier in store.tiers if tier.kind == kind).delete(make_entry(1).info.key)
        assert store.durable.ensure(IDENTITY, ids_of(1))
        assert holders(store, 1) == set(KINDS)
        assert not store.durable.ensure(IDENTITY, ids_of(2))


def test_an_entry_is_not_served_while_its_deletion_is_unconfirmed_though_the_remote_answers(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_store(redis_config(redis_server, timeout_s=10.0)) as store:
        store.durable.put(make_entry(1))
        connector = redis_tier_of(store).connector
        monkeypatch.setattr(connector, "delete", raising(RemoteError("not now")))
        assert not store.delete(make_entry(1).info.key)
        assert connector.exists(make_entry(1).info.key)
        assert hit(store, 1) is None
        assert not store.contains(make_entry(1).info.key)
        assert list(store.contents.infos()) == []
        assert not store.durable.put(make_entry(1))  # it would be deleted later
        monkeypatch.undo()


class StoreBehindProxy(Closing):
    """A store of memory, disk and Redis, with a proxy before Redis."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.proxy = Proxy((LOOPBACK, server.port))
        self.directory = directory
        self.config = RedisConfig(
            f"redis://{LOOPBACK}:{self.proxy.port}/0", unique_prefix(), timeout_s=2.0
        )
        self.store = self.open()

    def open(self) -> Store:
        return store_at(self.directory, redis=self.config)

    def disconnect(self) -> None:
        self.proxy.refusing = True
        self.proxy.close_connections()

    def pending_deletions(self) -> int:
        remote = self.store.stats().tiers[-1].remote
        assert remote is not None
        return remote.pending_deletions

    def close(self) -> None:
        self.store.close()
        self.proxy.close()


@pytest.fixture
def behind(redis_server: RedisServer, tmp_path: Path) -> Iterator[StoreBehindProxy]:
    with StoreBehindProxy(redis_server, tmp_path / "near") as made:
        yield made


def test_a_deletion_that_does_not_reach_the_remote_is_repeated_until_it_does_over_restarts_too(
    behind: StoreBehindProxy, redis_server: RedisServer
) -> None:
    behind.store.durable.put(make_entry(1))
    behind.store.durable.put(make_entry(2))
    behind.disconnect()
    behind.store.delete(make_entry(1).info.key)
    assert hit(behind.store, 1) is None
    assert behind.pending_deletions() == 1
    behind.store.close()

    behind.store = behind.open()  # a restart forgets nothing, though the remote does not answer yet
    assert hit(behind.store, 1) is None
    with store_at(None, redis=replace(behind.config, url=redis_config(redis_server).url)) as other:
        assert holders(other, 1) == {TierKind.REDIS}
        behind.proxy.refusing = False
        until(lambda: holders(other, 1) == set())
        assert holders(other, 2) == {TierKind.REDIS}
    until(lambda: behind.pending_deletions() == 0)
    assert behind.store.durable.put(make_entry(1))  # put again, it is served again
    assert holders(behind.store, 1) == {TierKind.MEMORY, TierKind.DISK, TierKind.REDIS}


def test_what_is_stored_while_pending_deletions_are_repeated_stays(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = unique_prefix()
    tier = remote_tier(redis_server, prefix=prefix)
    entries = {make_entry(number).info.key: make_entry(number) for number in (1, 2)}
    deleting = threading.Event()
    go_on = threading.Event()
    delete = tier.connector.delete

    def slow(key: EntryKey, *content_digest: bytes) -> bool:
        if threading.current_thread().name.endswith("-keeper"):
            deleting.set()
            assert go_on.wait(60)
        return delete(key, *content_digest)

    monkeypatch.setattr(tier.connector, "delete", slow)
    tier._pending.add(*entries)
    _, second = tier._pending.keys  # in the order in which they are deleted
    tier._wake.set()
    assert deleting.wait(60)
    putting = begin(lambda: tier.put(stored_form(entries[second])))
    putting.join(0.5)  # it may have to wait
    go_on.set()
    putting.join(60)
    until(lambda: not tier._pending.keys)
    tier.close()  # the thread that repeats them has ended
    with closing(remote_tier(redis_server, prefix=prefix)) as again:
        assert again.contains(second)


def test_a_remote_that_stalls_delays_neither_puts_nor_the_disk(behind: StoreBehindProxy) -> None:
    assert redis_tier_of(behind.store).put(stored_form(make_entry(0)))
    behind.proxy.stalled = True
    began = time.monotonic()
    for number in range(1, 20):
        behind.store.put(make_entry(number))
    assert time.monotonic() - began < 1.5  # less than one timeout
    assert redis_tier_of(behind.store).lease(IDENTITY, ids_of(0)) is None  # it stalls
    disk = behind.store.tiers[1]
    until(lambda: all(disk.contains(make_entry(number).info.key) for number in range(1, 20)), 60.0)
    behind.proxy.stalled = False


def test_an_entry_on_disk_counts_as_durable_though_the_remote_does_not_answer(
    behind: StoreBehindProxy,
) -> None:
    behind.disconnect()
    assert behind.store.durable.put(make_entry(1))
    assert TierKind.DISK in holders(behind.store, 1)
    assert behind.store.durable.ensure(IDENTITY, ids_of(1))
