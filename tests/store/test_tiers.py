"""What every tier must hold: one contract, run over all of them."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ragkv.store import LRU, DiskTier, Entry, MemoryTier, Tier
from ragkv.testing import ThrottledTier

from .entries import IDENTITY, digest, ids_of, make_entry, other_identities, read_all, same

MakeTier = Callable[..., Tier]


@pytest.fixture(params=["memory", "disk", "disk-direct", "throttled"])
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTier]:
    """Builds tiers of one kind; `room` is in entries of the default size."""
    opened: list[Tier] = []

    def make(room: float = 100) -> Tier:
        if request.param in ("memory", "throttled"):
            tier: Tier = MemoryTier(int(room * make_entry().size_bytes), LRU())
            if request.param == "throttled":
                tier = ThrottledTier(tier, bandwidth_bytes_per_s=1e9)
        else:
            file_bytes = 4 * 4096  # header, ids and scores, two layers
            place = tmp_path / str(len(opened))
            tier = DiskTier(place, int(room * file_bytes), LRU(), direct=request.param == "disk-direct")
        opened.append(tier)
        return tier

    yield make
    for tier in opened:
        tier.close()


class TestEveryTier:
    def test_gives_back_the_very_bytes_and_facts(self, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), make_entry(7, group="talk", index=3)
        assert tier.put(entry)
        lease = tier.lease(IDENTITY, ids_of(7))
        assert lease is not None
        with lease:
            assert same(read_all(lease), entry)

    def test_fills_the_buffer_it_is_given_or_returns_a_view(self, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), make_entry(1)
        tier.put(entry)
        out = torch.zeros_like(entry.kv[0])
        lease = tier.lease(IDENTITY, ids_of(1))
        assert lease is not None
        with lease:
            got = lease.read_layer(1, out)
        assert torch.equal(got, entry.kv[1])
        assert got is out or got.data_ptr() == entry.kv[1].data_ptr()

    def test_unknown_tokens_are_a_miss(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        tier.put(make_entry(1))
        assert tier.lease(IDENTITY, ids_of(2)) is None
        assert tier.stats().misses == 1

    @pytest.mark.parametrize(("field", "identity"), other_identities())
    def test_any_other_identity_is_a_miss(self, make_tier: MakeTier, field: str, identity: object) -> None:
        tier = make_tier()
        tier.put(make_entry(1))
        assert tier.lease(identity, ids_of(1)) is None, field  # type: ignore[arg-type]

    @pytest.mark.parametrize("impostor", [make_entry(2), make_entry(1, identity=other_identities()[0][1])])
    def test_a_key_alone_proves_nothing(
        self, make_tier: MakeTier, impostor: Entry, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As if two entries had one key: other tokens or another model's, under the key that is asked for."""
        tier, key = make_tier(), make_entry(1).info.key
        tier.put(Entry(dataclasses.replace(impostor.info, key=key), impostor.kv, impostor.sensitivity))
        assert tier.lease(IDENTITY, ids_of(1)) is None
        assert tier.stats().damaged == 1
        assert not tier.contains(key)
        assert "not those asked for" in caplog.text

    def test_evicts_the_least_recently_used(self, make_tier: MakeTier) -> None:
        tier = make_tier(room=2)
        tier.put(make_entry(1))
        tier.put(make_entry(2))
        tier.lease(IDENTITY, ids_of(1)).close()  # type: ignore[union-attr]
        tier.put(make_entry(3))
        held = {number for number in (1, 2, 3) if tier.contains(make_entry(number).info.key)}
        assert held == {1, 3}
        assert tier.stats().evictions == 1

    def test_never_evicts_what_is_leased(self, make_tier: MakeTier) -> None:
        tier = make_tier(room=1)
        tier.put(make_entry(1))
        with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
            assert not tier.put(make_entry(2))
            assert same(read_all(lease), make_entry(1))
        assert tier.put(make_entry(2))
        assert not tier.contains(make_entry(1).info.key)

    def test_refuses_what_is_larger_than_itself(self, make_tier: MakeTier) -> None:
        tier = make_tier(room=1)
        tier.put(make_entry(1))
        assert not tier.put(make_entry(2, layers=64))
        assert tier.contains(make_entry(1).info.key)

    def test_a_second_put_changes_nothing(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        assert tier.put(make_entry(1))
        before = tier.stats()
        assert tier.put(make_entry(1))
        assert tier.stats() == before

    def test_deleted_is_gone_but_an_open_lease_stays_readable(self, make_tier: MakeTier) -> None:
        tier, key = make_tier(), make_entry(1).info.key
        tier.put(make_entry(1))
        with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
            assert tier.delete(key)
            assert not tier.delete(key)
            assert not tier.contains(key)
            assert tier.lease(IDENTITY, ids_of(1)) is None
            assert same(read_all(lease), make_entry(1))
        assert tier.stats().used_bytes == 0

    def test_a_lease_of_a_deleted_entry_does_not_unpin_its_successor(self, make_tier: MakeTier) -> None:
        tier = make_tier(room=1)
        tier.put(make_entry(1))
        old = tier.lease(IDENTITY, ids_of(1))
        tier.delete(make_entry(1).info.key)
        tier.put(make_entry(1))
        with tier.lease(IDENTITY, ids_of(1)):  # type: ignore[union-attr]
            old.close()  # type: ignore[union-attr]
            assert not tier.put(make_entry(2))

    def test_closing_a_lease_or_a_tier_twice_is_harmless(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        tier.put(make_entry(1))
        lease = tier.lease(IDENTITY, ids_of(1))
        lease.close()  # type: ignore[union-attr]
        lease.close()  # type: ignore[union-attr]
        tier.close()
        tier.close()

    def test_reading_and_storing_write_to_nobodys_tensor(self, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), make_entry(1)
        before = digest(entry.kv, entry.sensitivity)
        tier.put(entry)
        for _ in range(2):
            with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
                read_all(lease)
                assert same(read_all(lease), entry)
        assert digest(entry.kv, entry.sensitivity) == before

    def test_a_view_of_a_larger_tensor_is_kept_as_its_own_bytes_alone(self, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), make_entry(1)
        large = torch.cat([entry.kv, entry.kv], dim=3)  # twice the tokens
        view = type(entry)(entry.info, large[:, :, :, :4], entry.sensitivity)
        tier.put(view)
        large.zero_()
        with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
            assert same(read_all(lease), entry)

    def test_gc_drops_what_it_is_told_and_says_how_much(self, make_tier: MakeTier) -> None:
        tier, other = make_tier(), other_identities()[0][1]
        tier.put(make_entry(1))
        tier.put(make_entry(2, identity=other))
        before = tier.stats().used_bytes
        freed = tier.gc(lambda identity: identity == IDENTITY)
        assert freed == before - tier.stats().used_bytes == before / 2
        assert [info.identity for info in tier.infos()] == [IDENTITY]

    def test_counts_what_it_holds_and_did(self, make_tier: MakeTier) -> None:
        tier, entry = make_tier(room=3), make_entry(1)
        tier.put(entry)
        with tier.lease(IDENTITY, ids_of(1)) as lease:  # type: ignore[union-attr]
            read_all(lease)
        stats = tier.stats()
        assert (stats.entries, stats.hits, stats.misses, stats.damaged) == (1, 1, 0, 0)
        assert stats.read_bytes == entry.kv.nbytes
        assert 0 < stats.used_bytes == stats.written_bytes <= stats.capacity_bytes
