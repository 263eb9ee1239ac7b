"""Faults between a tier and real servers: never a wrong byte, always a miss, and no more time lost
than the timeout.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ragkv.cluster import RemoteTier
from ragkv.config import RedisConfig, S3Config, StoreConfig
from ragkv.errors import EntryDamagedError
from ragkv.runtime import Closing
from ragkv.store.entry import Entry
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import Tier
from tests.cluster.faulty_proxy import Proxy
from tests.scheduling.helpers import until
from tests.store.entries import IDENTITY, ids_of, make_entry, read_all, same

from .helpers import counted, remote_of, unique_prefix
from .servers import LOOPBACK, RedisServer, S3Server

pytestmark = pytest.mark.allow_hosts([LOOPBACK])

TIMEOUT_S = 2.0  # of both servers: moto is one Python process, and so is the proxy
SLACK_S = 4.0  # for a busy machine
LAYERS = 12
GROUP_BYTES = 2 * 64 * 1024  # two layers a group, six groups


def entry(number: int) -> Entry:
    """An entry with layers of 64 KiB."""
    return make_entry(number, tokens=2048, layers=LAYERS)


class ProxiedServer(Closing):
    """A server with a proxy before it, and tiers that connect through the proxy or directly."""

    def __init__(self, server: RedisServer | S3Server) -> None:
        self.server = server
        self.proxy = Proxy((LOOPBACK, server.port))
        self.prefix = unique_prefix()
        self._tiers: list[Tier] = []

    def tier(self, through: bool = True, **changes: Any) -> RemoteTier:
        """A tier over the server; `through` the proxy its timeout is short."""
        port = self.proxy.port if through else self.server.port
        timeout_s = TIMEOUT_S if through else 20.0
        settings = {
            "prefix": self.prefix,
            "timeout_s": timeout_s,
            "group_bytes": GROUP_BYTES,
            **changes,
        }
        if isinstance(self.server, RedisServer):
            config = StoreConfig(redis=RedisConfig(url=f"redis://{LOOPBACK}:{port}/0", **settings))
        else:
            where: dict[str, Any] = {
                "bucket": self.server.BUCKET,
                "endpoint": f"http://{LOOPBACK}:{port}",
            }
            config = StoreConfig(s3=S3Config(**where, **settings))
        tier = remote_of(config)
        self._tiers.append(tier)
        return tier

    def close(self) -> None:
        self.proxy.close()
        for tier in self._tiers:
            tier.close()


@pytest.fixture(params=["redis", "s3"])
def proxied(request: pytest.FixtureRequest) -> Iterator[ProxiedServer]:
    with ProxiedServer(request.getfixturevalue(f"{request.param}_server")) as made:
        made.tier(through=False).put(stored_form(entry(1)))
        yield made


def outcome(
    tier: Tier, number: int = 1, before_layer: Callable[[int], object] = lambda _: None
) -> Entry | None:
    """What a request gets: the right entry or nothing. `before_layer` is called before
    each layer.
    """
    lease = tier.lease(IDENTITY, ids_of(number, 2048))
    if lease is None:
        return None
    with lease:
        lease.prefetch()
        try:
            for layer in range(LAYERS):
                before_layer(layer)
                lease.read_layer(layer)
            found = read_all(lease)
        except EntryDamagedError:
            return None
    assert same(found, entry(number)), "wrong bytes"
    return found


def is_available(tier: RemoteTier) -> bool:
    return tier.health.available


def test_refused_connections_are_misses_and_open_the_breaker(proxied: ProxiedServer) -> None:
    tier = proxied.tier()
    assert outcome(tier) is not None  # connections are there
    proxied.proxy.refusing = True
    proxied.proxy.close_connections()
    began = time.monotonic()
    assert all(outcome(tier) is None for _ in range(20))
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    assert not tier.put(stored_form(entry(2)))
    assert not tier.contains(entry(1).info.key)
    stats = tier.stats().remote
    assert stats is not None and stats.skipped > 0 and not stats.answers
    if isinstance(proxied.server, RedisServer):
        held = tier.connector.client.connection_pool._available_connections  # type: ignore[attr-defined]
        assert len(held) > 1 and not any(one.is_connected for one in held)
    proxied.proxy.refusing = False
    until(lambda: outcome(tier) is not None)  # it is called again


@pytest.mark.parametrize("when", ["lookup", "layers"])
def test_a_stall_costs_one_request_its_timeout_and_later_requests_nothing(
    proxied: ProxiedServer, when: str
) -> None:
    tier = proxied.tier()
    assert outcome(tier) is not None  # connections are there

    def stall(layer: int) -> None:
        if layer == 5:
            proxied.proxy.stalled = True

    proxied.proxy.stalled = when == "lookup"
    began = time.monotonic()
    found = outcome(tier, before_layer=stall if when == "layers" else lambda _: None)
    assert found is None or when == "layers"  # all layers may have been fetched before the stall
    assert outcome(tier) is None
    lost = time.monotonic() - began
    for _ in range(50):
        assert outcome(tier) is None
    assert time.monotonic() - began < lost + SLACK_S
    assert lost < 2 * TIMEOUT_S + SLACK_S
    proxied.proxy.stalled = False
    until(lambda: outcome(tier) is not None)


def test_an_answer_that_trickles_in_counts_as_a_stall(proxied: ProxiedServer) -> None:
    """Each `recv` returns a byte in time; the answer as a whole is late all the same."""
    tier = proxied.tier()
    assert outcome(tier) is not None
    proxied.proxy.trickling = True
    began = time.monotonic()
    assert outcome(tier) is None
    assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S
    proxied.proxy.trickling = False


@pytest.mark.parametrize("after", [0, 10, 5_000, 70_000, 300_000, 600_000])
def test_an_answer_that_is_cut_off_is_a_miss_and_deletes_nothing(
    proxied: ProxiedServer, after: int
) -> None:
    tier = proxied.tier()
    proxied.proxy.cut_after_bytes = after
    outcome(tier)
    proxied.proxy.cut_after_bytes = None
    assert proxied.tier(through=False).contains(entry(1).info.key)
    until(lambda: outcome(tier) is not None)


@pytest.mark.parametrize("every", [1, 3_000, 50_000])
def test_bytes_changed_by_the_network_are_never_served(proxied: ProxiedServer, every: int) -> None:
    """One bit in every so many bytes is changed: in the protocol, a header, or a layer."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for at in range(0, len(data), every):
            changed[at] ^= 1
        return bytes(changed)

    tier = proxied.tier()
    proxied.proxy.change = change
    for _ in range(3):
        assert outcome(tier) is None
    proxied.proxy.change = lambda data: data
    tier.put(stored_form(entry(1)))
    proxied.tier(through=False).put(stored_form(entry(1)))  # if it was deleted as damaged
    until(lambda: outcome(tier) is not None)


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {  # of a value, also by one of another group
    "flip": lambda value, _: (
        value[: len(value) // 2]
        + bytes([value[len(value) // 2] ^ 1])
        + value[len(value) // 2 + 1 :]
    ),
    "truncate": lambda value, _: value[:-1000],
    "lengthen": lambda value, _: value + b"\0" * 1000,
    "swap": lambda _, other: other,
    "empty": lambda *_: b"?",
}


class TestRedis:
    @pytest.fixture
    def proxied(self, own_redis: RedisServer) -> Iterator[ProxiedServer]:
        with ProxiedServer(own_redis) as made:
            made.tier(through=False).put(stored_form(entry(1)))
            yield made

    def test_a_server_killed_during_a_read_and_restarted_empty_is_used_again(
        self, proxied: ProxiedServer
    ) -> None:
        tier = proxied.tier()
        began = time.monotonic()

        def kill(layer: int) -> None:
            if layer == 5:
                proxied.server.kill()

        outcome(tier, before_layer=kill)
        assert outcome(tier) is None
        assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S
        proxied.server.start()
        until(lambda: is_available(tier))
        assert outcome(tier) is None  # it is empty
        assert counted(tier).used_bytes == 0
        assert tier.put(stored_form(entry(1)))
        assert outcome(tier) is not None

    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("layer_group", [0, 3])
    def test_a_value_that_is_not_what_was_written_is_never_served_and_is_deleted(
        self, proxied: ProxiedServer, damage: str, layer_group: int
    ) -> None:
        client = proxied.tier(through=False).connector.client  # type: ignore[attr-defined]
        (name,) = client.keys(f"*{entry(1).info.key.to_text()}")
        client.hset(
            name, layer_group, DAMAGES[damage](client.hget(name, layer_group), client.hget(name, 1))
        )
        tier = proxied.tier()
        assert outcome(tier) is None
        assert tier.stats().damaged == 1
        assert not tier.contains(entry(1).info.key)
        assert tier.put(stored_form(entry(1)))
        assert outcome(tier) is not None

    def test_a_late_read_does_not_delete_an_entry_that_was_written_again(
        self, proxied: ProxiedServer
    ) -> None:
        tier = proxied.tier(through=False)
        key = entry(1).info.key
        head = tier.find(key)
        for _ in range(2):
            tier.reader.delete_damaged(key, EntryDamagedError(key, "a part is bad"), head)
            tier.put(stored_form(entry(1)))
        assert outcome(tier) is not None
        assert tier.stats().damaged == 1

    def test_an_entry_without_a_layer_group_is_a_miss_and_can_be_written_again(
        self, proxied: ProxiedServer
    ) -> None:
        client = proxied.tier(through=False).connector.client  # type: ignore[attr-defined]
        tier = proxied.tier()
        (name,) = client.keys(f"*{entry(1).info.key.to_text()}")
        client.hdel(name, 3)
        assert outcome(tier) is None
        assert tier.stats().damaged == 0
        assert tier.put(stored_form(entry(1)))
        assert outcome(tier) is not None
        # evicted, perhaps after the fetch
        outcome(tier, before_layer=lambda layer: layer == 1 and client.delete(name))
        assert tier.put(stored_form(entry(1)))
        assert outcome(tier) is not None

    def test_layer_groups_of_two_writings_are_not_mixed_and_the_new_writing_is_not_deleted(
        self, proxied: ProxiedServer
    ) -> None:
        other = proxied.tier(through=False, group_bytes=GROUP_BYTES * 2)
        tier = proxied.tier()

        lease = tier.lease(IDENTITY, ids_of(1, 2048))
        assert lease is not None
        other.delete(entry(1).info.key)
        assert other.put(stored_form(entry(1)))
        with lease, pytest.raises(EntryDamagedError):
            read_all(lease)
        assert outcome(other) is not None

    def test_a_server_that_evicts_under_maxmemory_serves_right_entries_or_misses(self) -> None:
        limits = ("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
        with RedisServer(*limits) as server, ProxiedServer(server) as proxied:
            tier = proxied.tier(through=False)
            served = 0
            for number in range(40):  # of 0.8 MB each
                tier.put(stored_form(entry(number)))
                served += outcome(tier, number) is not None
                served += outcome(tier, number // 2) is not None
            assert 20 < served < 80
            assert counted(tier).entries < 40

    def test_a_full_server_that_evicts_nothing_refuses_writes_and_still_serves(self) -> None:
        limits = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
        with RedisServer(*limits) as server, ProxiedServer(server) as proxied:
            tier = proxied.tier(through=False)
            kept = [number for number in range(3, 20) if tier.put(stored_form(entry(number)))]
            assert 0 < len(kept) < 17
            assert is_available(tier)
            assert all(outcome(tier, number) is not None for number in kept)
            assert tier.delete(entry(kept[0]).info.key)


def test_s3_killed_and_restarted_empty_is_used_again() -> None:
    with S3Server() as server, ProxiedServer(server) as proxied:
        tier = proxied.tier()
        assert tier.put(stored_form(entry(1)))
        assert outcome(tier) is not None
        server.kill()
        began = time.monotonic()
        assert outcome(tier) is None
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        server.start()
        until(lambda: is_available(tier))
        assert outcome(tier) is None
        assert tier.put(stored_form(entry(1)))
        assert outcome(tier) is not None
