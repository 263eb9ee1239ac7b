"""Faults between us and real servers: no wrong byte, nothing raised but a miss, time lost bounded by the timeout."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ragkv.config import RedisConfig, S3Config, StoreConfig
from ragkv.errors import EntryDamagedError
from ragkv.store import Entry, Tier
from ragkv.store.remote import RemoteTier, open_remote
from ragkv.testing.faulty_proxy import Proxy

from ..entries import IDENTITY, ids_of, make_entry, read_all, same
from .helpers import unique_prefix
from .servers import LOOPBACK, RedisServer, S3Server, free_port

pytestmark = pytest.mark.allow_hosts([LOOPBACK])

TIMEOUT_S = 0.5
S3_TIMEOUT_S = 2.0  # moto is one Python process
SLACK_S = 2.0  # of a machine that does other things as well
LAYERS = 12
GROUP_BYTES = 2 * 64 * 1024  # two layers a group, six groups


def entry(number: int) -> Entry:
    """Of layers of 64 KiB."""
    return make_entry(number, tokens=2048, layers=LAYERS)


class Place:
    """A server, a proxy before it, and tiers that go through it or past it."""

    def __init__(self, server: RedisServer | S3Server) -> None:
        self.server = server
        self.proxy = Proxy((LOOPBACK, server.port))
        self.prefix = unique_prefix()
        self.timeout_s = TIMEOUT_S if isinstance(server, RedisServer) else S3_TIMEOUT_S
        self._tiers: list[Tier] = []

    def tier(self, through: bool = True, **changes: Any) -> RemoteTier:
        """A tier; its timeout is a short one if it goes through the proxy."""
        port = self.proxy.port if through else self.server.port
        timeout_s = self.timeout_s if through else 20.0
        settings = {"prefix": self.prefix, "timeout_s": timeout_s, "group_bytes": GROUP_BYTES, **changes}
        if isinstance(self.server, RedisServer):
            config = StoreConfig(redis=RedisConfig(url=f"redis://{LOOPBACK}:{port}/0", **settings))
        else:
            where: dict[str, Any] = {"bucket": self.server.BUCKET, "endpoint": f"http://{LOOPBACK}:{port}"}
            config = StoreConfig(s3=S3Config(**where, **settings))
        (tier,) = open_remote(config)
        self._tiers.append(tier)
        return tier

    def close(self) -> None:
        self.proxy.close()
        for tier in self._tiers:
            tier.close()


@pytest.fixture(params=["redis", "s3"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(request.getfixturevalue(f"{request.param}_server"))
    made.tier(through=False).put(entry(1))
    yield made
    made.close()


def outcome(tier: Tier, number: int = 1, layers: Callable[[int], object] = lambda _: None) -> Entry | None:
    """What a request gets: the right entry or nothing. `layers` is called before each layer."""
    lease = tier.lease(IDENTITY, ids_of(number, 2048))
    if lease is None:
        return None
    with lease:
        lease.prefetch()
        try:
            for layer in range(LAYERS):
                layers(layer)
                lease.read_layer(layer)
            found = read_all(lease)
        except EntryDamagedError:
            return None
    assert same(found, entry(number)), "wrong bytes"
    return found


def is_closed(tier: RemoteTier) -> bool:
    return tier._health.available


def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


def test_through_a_sound_network_everything_comes(place: Place) -> None:
    tier = place.tier()
    assert outcome(tier) is not None
    assert is_closed(tier)


def test_refused_connections_are_misses_and_nobody_asks_any_more(place: Place) -> None:
    tier = place.tier()
    place.proxy.refusing = True
    place.proxy.close_connections()
    began = time.monotonic()
    assert all(outcome(tier) is None for _ in range(20))
    assert time.monotonic() - began < place.timeout_s + SLACK_S
    assert not tier.put(entry(2))
    assert not tier.contains(entry(1).info.key)
    stats = tier.stats().remote
    assert stats is not None and (stats.state, stats.opened) != ("closed", 0)
    assert stats.skipped > 0


def test_a_remote_that_answers_again_is_asked_again(place: Place) -> None:
    tier = place.tier()
    place.proxy.refusing = True
    place.proxy.close_connections()
    assert all(outcome(tier) is None for _ in range(5))
    place.proxy.refusing = False
    until(lambda: outcome(tier) is not None)


@pytest.mark.parametrize("when", ["lookup", "layers"])
def test_a_stall_costs_one_timeout_whatever_is_asked_afterwards(place: Place, when: str) -> None:
    tier = place.tier()
    assert outcome(tier) is not None  # connections are there

    def stall(layer: int) -> None:
        if layer == 5:
            place.proxy.stalled = True

    place.proxy.stalled = when == "lookup"
    began = time.monotonic()
    assert outcome(tier, layers=stall if when == "layers" else lambda _: None) is None or when == "layers"
    assert outcome(tier) is None
    lost = time.monotonic() - began
    for _ in range(50):
        assert outcome(tier) is None
    assert time.monotonic() - began < lost + SLACK_S
    assert lost < 2 * place.timeout_s + SLACK_S
    place.proxy.stalled = False
    until(lambda: outcome(tier) is not None)


def test_a_trickle_is_a_stall(place: Place) -> None:
    """A byte now and then keeps every `recv` happy; the answer as a whole is late all the same."""
    tier = place.tier()
    assert outcome(tier) is not None
    place.proxy.trickling = True
    began = time.monotonic()
    assert outcome(tier) is None
    assert time.monotonic() - began < 2 * place.timeout_s + SLACK_S
    place.proxy.trickling = False


@pytest.mark.parametrize("after", [0, 10, 5_000, 70_000, 300_000, 600_000])
def test_an_answer_cut_off_is_a_miss_and_deletes_nothing(place: Place, after: int) -> None:
    tier = place.tier()
    place.proxy.cut_after_bytes = after
    outcome(tier)
    place.proxy.cut_after_bytes = None
    assert place.tier(through=False).contains(entry(1).info.key)
    until(lambda: outcome(tier) is not None)


@pytest.mark.parametrize("every", [1, 3_000, 50_000])
def test_bytes_changed_on_the_way_are_never_served(place: Place, every: int) -> None:
    """One bit in so many bytes, wherever it falls: in the protocol, a header, or a layer."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for at in range(0, len(data), every):
            changed[at] ^= 1
        return bytes(changed)

    tier = place.tier()
    place.proxy.change = change
    for _ in range(3):
        assert outcome(tier) is None
    place.proxy.change = lambda data: data
    tier.put(entry(1))
    place.tier(through=False).put(entry(1))  # if it was taken for damaged at its place
    until(lambda: outcome(tier) is not None)


class TestRedis:
    @pytest.fixture
    def server(self) -> Iterator[RedisServer]:
        made = RedisServer()
        yield made
        made.remove()

    @pytest.fixture
    def here(self, server: RedisServer) -> Iterator[Place]:
        made = Place(server)
        made.tier(through=False).put(entry(1))
        yield made
        made.close()

    def test_killed_in_the_middle_of_a_read_and_restarted_empty(self, here: Place) -> None:
        tier = here.tier()
        began = time.monotonic()

        def kill(layer: int) -> None:
            if layer == 5:
                here.server.kill()

        outcome(tier, layers=kill)
        assert outcome(tier) is None
        assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S
        here.server.start()
        until(lambda: is_closed(tier))
        assert outcome(tier) is None  # it is empty
        assert tier.stats().used_bytes == 0
        assert tier.put(entry(1))
        assert outcome(tier) is not None

    @pytest.mark.parametrize("damage", ["flip", "truncate", "lengthen", "swap", "empty"])
    @pytest.mark.parametrize("group", [0, 3])
    def test_a_value_that_is_not_what_was_written_is_never_served_and_goes(
        self, here: Place, damage: str, group: int
    ) -> None:
        client = here.tier(through=False)._connector._client  # type: ignore[attr-defined]
        (name,) = client.keys(f"*{entry(1).info.key}:{group}")
        value = bytearray(client.get(name))
        if damage == "flip":
            value[len(value) // 2] ^= 1
        elif damage == "truncate":
            value = value[:-1000]
        elif damage == "lengthen":
            value += b"\0" * 1000
        elif damage == "swap":
            value = bytearray(client.get(client.keys(f"*{entry(1).info.key}:1")[0]))
        else:
            value = bytearray(b"?")
        client.set(name, bytes(value))
        tier = here.tier()
        assert outcome(tier) is None
        assert tier.stats().damaged == 1
        assert not tier.contains(entry(1).info.key)
        assert tier.put(entry(1))
        assert outcome(tier) is not None

    def test_a_group_the_server_evicted_is_a_miss_and_the_entry_can_be_written_anew(self, here: Place) -> None:
        client = here.tier(through=False)._connector._client  # type: ignore[attr-defined]
        tier = here.tier()
        client.delete(*client.keys(f"*{entry(1).info.key}:3"))
        assert outcome(tier) is None
        assert tier.stats().damaged == 0  # nothing was
        assert tier.put(entry(1))
        assert outcome(tier) is not None
        gone = client.keys(f"*{entry(1).info.key}:3")
        outcome(tier, layers=lambda layer: layer == 1 and client.delete(*gone))  # it may have been fetched already
        assert tier.put(entry(1))
        assert outcome(tier) is not None

    def test_another_replicas_new_writing_is_not_mixed_with_the_old_one_nor_deleted(self, here: Place) -> None:
        other = here.tier(through=False, group_bytes=GROUP_BYTES * 2)
        tier = here.tier()

        def rewrite(layer: int) -> None:
            if layer == 0:
                other.delete(entry(1).info.key)
                assert other.put(entry(1))

        lease = tier.lease(IDENTITY, ids_of(1, 2048))
        assert lease is not None
        rewrite(0)
        with lease, pytest.raises(EntryDamagedError):
            read_all(lease)
        assert outcome(other) is not None

    def test_under_maxmemory_what_is_served_is_right_and_what_is_not_is_a_miss(self) -> None:
        server = RedisServer("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
        place = Place(server)
        try:
            tier = place.tier(through=False, max_bytes=10**9)
            served = 0
            for number in range(40):  # of 0.8 MB each
                tier.put(entry(number))
                served += outcome(tier, number) is not None
                served += outcome(tier, number // 2) is not None
            assert 20 < served < 80
            tier._connector.audit()
            assert tier.stats().entries < 40
        finally:
            place.close()
            server.remove()

    def test_a_full_server_that_evicts_nothing_refuses_and_that_is_all(self) -> None:
        server = RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
        place = Place(server)
        try:
            tier = place.tier(through=False, max_bytes=10**9)
            kept = [number for number in range(3, 20) if tier.put(entry(number))]
            assert 0 < len(kept) < 17
            assert is_closed(tier)
            assert all(outcome(tier, number) is not None for number in kept)
            assert tier.delete(entry(kept[0]).info.key)
        finally:
            place.close()
            server.remove()


def test_nothing_listens_at_all() -> None:
    config = StoreConfig(redis=RedisConfig(url=f"redis://{LOOPBACK}:{free_port()}/0", timeout_s=TIMEOUT_S))
    (tier,) = open_remote(config)
    began = time.monotonic()
    assert all(tier.lease(IDENTITY, ids_of(number)) is None for number in range(10))
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    tier.close()


def test_s3_killed_and_restarted_empty() -> None:
    server = S3Server()
    place = Place(server)
    try:
        tier = place.tier(timeout_s=2.0)
        assert tier.put(entry(1))
        assert outcome(tier) is not None
        server.kill()
        began = time.monotonic()
        assert outcome(tier) is None
        assert time.monotonic() - began < 2.0 + SLACK_S
        server.start()
        until(lambda: is_closed(tier))
        assert outcome(tier) is None
        assert tier.put(entry(1))
        assert outcome(tier) is not None
    finally:
        place.close()
        server.kill()
