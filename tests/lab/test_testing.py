"""What the shipped fakes must hold: as slow as they say, failing as they say, and an ordinary tier otherwise."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv.errors import EntryDamagedError
from ragkv.lab.testing import FailingTier, Failure, ThrottledTier
from ragkv.store import LRU, Lease, MemoryTier, Tier
from tests.store.entries import IDENTITY, ids_of, make_entry, read_all, same

LAYER_BYTES = make_entry(1).info.layer_bytes


def filled() -> MemoryTier:
    tier = MemoryTier(10**6, LRU())
    tier.put(make_entry(1))
    return tier


def lease_of(tier: Tier) -> Lease:
    lease = tier.lease(IDENTITY, ids_of(1))
    assert lease is not None
    return lease


def test_a_throttled_read_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    tier = ThrottledTier(filled(), bandwidth_bytes_per_s=LAYER_BYTES / 0.04, latency_s=0.02)
    with lease_of(tier) as lease:
        began = time.monotonic()
        lease.read_layer(0)
        assert 0.06 <= time.monotonic() - began < 5


def test_concurrent_reads_share_the_bandwidth_but_not_the_latency() -> None:
    tier = ThrottledTier(filled(), bandwidth_bytes_per_s=LAYER_BYTES / 0.02, latency_s=2.0)
    with lease_of(tier) as lease, ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        list(pool.map(lease.read_layer, [0, 1, 0, 1]))
        assert 4 * 0.02 + 2.0 <= time.monotonic() - began < 4 * (0.02 + 2.0)


def test_a_failing_layer_raises_and_drops_the_entry_and_the_layers_before_it_are_served() -> None:
    tier = FailingTier(filled(), layers={1})
    with lease_of(tier) as lease:
        lease.read_layer(0)
        with pytest.raises(EntryDamagedError, match="layer 1"):
            lease.read_layer(1)
    assert tier.lease(IDENTITY, ids_of(1)) is None


def test_copying_a_whole_entry_is_as_slow_as_reading_it() -> None:
    tier = ThrottledTier(filled(), bandwidth_bytes_per_s=make_entry(1).info.size_bytes / 0.04, latency_s=0.02)
    with lease_of(tier) as lease:
        began = time.monotonic()
        lease.read_encoded()
        assert 0.06 <= time.monotonic() - began < 5


def test_copying_a_whole_entry_fails_where_reading_it_fails() -> None:
    with lease_of(FailingTier(filled(), layers={1})) as lease, pytest.raises(EntryDamagedError, match="layer 1"):
        lease.read_encoded()


def test_a_broken_layer_raises_a_plain_error_and_the_entry_stays() -> None:
    tier = FailingTier(filled(), layers={0}, failure=Failure.BROKEN)
    with lease_of(tier) as lease:
        with pytest.raises(OSError, match="on purpose"):
            lease.read_layer(0)
        tier.layers = ()
        assert same(read_all(lease), make_entry(1))
