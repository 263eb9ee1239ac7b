"""What the shipped fakes must hold: as slow as they say, failing as they say, and an ordinary tier otherwise."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv.errors import EntryDamagedError
from ragkv.store import LRU, MemoryTier
from ragkv.testing import FailingTier, Failure, ThrottledTier
from tests.store.entries import IDENTITY, ids_of, make_entry, read_all, same


def filled() -> MemoryTier:
    tier = MemoryTier(10**6, LRU())
    tier.put(make_entry(1))
    return tier


def test_a_throttled_read_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    layer_bytes = make_entry(1).info.layer_bytes
    tier = ThrottledTier(filled(), bandwidth_bytes_per_s=layer_bytes / 0.04, latency_s=0.02)
    with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
        begin = time.monotonic()
        lease.read_layer(0)
        assert 0.06 <= time.monotonic() - begin < 1


def test_concurrent_reads_share_the_bandwidth_but_not_the_latency() -> None:
    layer_bytes = make_entry(1).info.layer_bytes
    tier = ThrottledTier(filled(), bandwidth_bytes_per_s=layer_bytes / 0.02, latency_s=0.5)
    with tier.lease(IDENTITY, ids_of(1)) as lease, ThreadPoolExecutor(4) as pool:  # type: ignore[union-attr]
        begin = time.monotonic()
        list(pool.map(lease.read_layer, [0, 1, 0, 1]))
        assert 4 * 0.02 + 0.5 <= time.monotonic() - begin < 4 * (0.02 + 0.5)


def test_a_damaged_layer_is_dropped_and_the_others_are_served() -> None:
    tier = FailingTier(filled(), layers={1})
    with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
        lease.read_layer(0)
        with pytest.raises(EntryDamagedError, match="layer 1"):
            lease.read_layer(1)
    assert tier.lease(IDENTITY, ids_of(1)) is None


def test_copies_between_tiers_are_as_slow_and_fail_as_reads_do() -> None:
    entry = make_entry(1)
    slow = ThrottledTier(filled(), bandwidth_bytes_per_s=entry.info.size_bytes / 0.04, latency_s=0.02)
    with slow.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
        begin = time.monotonic()
        lease.read_encoded()
        assert 0.06 <= time.monotonic() - begin < 1
    failing = FailingTier(filled(), layers={1})
    failed = failing.lease(IDENTITY, ids_of(1))
    assert failed is not None
    with failed, pytest.raises(EntryDamagedError, match="layer 1"):
        failed.read_encoded()


def test_a_broken_layer_raises_what_nobody_expects_until_it_is_mended() -> None:
    tier = FailingTier(filled(), layers={0}, failure=Failure.BROKEN)
    with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
        with pytest.raises(OSError, match="on purpose"):
            lease.read_layer(0)
        tier.layers = ()
        assert same(read_all(lease), make_entry(1))
