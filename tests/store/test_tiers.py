"""What every tier must hold: one contract, run over all of them and over every codec."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv.store import LRU, DiskTier, EncodedEntry, Entry, Identity, MemoryTier, ReadOnlyDiskTier, Tier, aligned_empty
from ragkv.testing import ThrottledTier

from .entries import CODEC_NAMES, digest, ids_of, kept, make_entry, other_identities, read_all, same, with_codec
from .remote.helpers import remote_tier, value_bytes

MakeTier = Callable[..., Tier]


class House:
    """Entries of one codec."""

    def __init__(self, codec: str) -> None:
        self.identity = with_codec(codec)

    def entry(self, number: int = 0, **changes: Any) -> Entry:
        return make_entry(number, **{"identity": self.identity, **changes})

    def others(self) -> list[tuple[str, Identity]]:
        """This house's identity with one field changed, for every field."""
        return other_identities(self.identity)


@pytest.fixture(params=CODEC_NAMES)
def house(request: pytest.FixtureRequest) -> House:
    return House(request.param)


@pytest.fixture(params=["memory", "disk", "disk-direct", "throttled", "redis", "s3"])
def make_tier(request: pytest.FixtureRequest, house: House, tmp_path: Path) -> Iterator[MakeTier]:
    """Builds tiers of one kind; `room` is in entries of the default size."""
    opened: list[Tier] = []

    def make(room: float = 100) -> Tier:
        if request.param in ("memory", "throttled"):
            tier: Tier = MemoryTier(int(room * EncodedEntry.of(house.entry()).size_bytes), LRU())
            if request.param == "throttled":
                tier = ThrottledTier(tier, bandwidth_bytes_per_s=1e9)
        elif request.param in ("redis", "s3"):
            server = request.getfixturevalue(f"{request.param}_server")
            tier = remote_tier(server, int(room * value_bytes(house.entry())))
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
    def test_gives_back_the_very_bytes_and_facts(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), house.entry(7, group="talk", index=3)
        assert tier.put(entry)
        lease = tier.lease(house.identity, ids_of(7))
        assert lease is not None
        with lease:
            assert same(read_all(lease), kept(entry))

    def test_fills_the_buffer_it_is_given_or_returns_a_view(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), house.entry(1)
        tier.put(entry)
        out = torch.zeros_like(entry.kv[0])
        lease = tier.lease(house.identity, ids_of(1))
        assert lease is not None
        with lease:
            got = lease.read_layer(1, out)
        assert torch.equal(got, kept(entry).kv[1])
        assert got.data_ptr() == (entry.kv[1] if lease.in_place else out).data_ptr()

    def test_unknown_tokens_are_a_miss(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier()
        tier.put(house.entry(1))
        assert tier.lease(house.identity, ids_of(2)) is None
        assert tier.stats().misses == 1

    def test_any_other_identity_is_a_miss(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier()
        tier.put(house.entry(1))
        for field, identity in house.others():
            assert tier.lease(identity, ids_of(1)) is None, field

    @pytest.mark.parametrize("other", ["tokens", "model", "codec"])
    def test_a_key_alone_proves_nothing(
        self, house: House, make_tier: MakeTier, other: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As if two entries had one key: other tokens, another model's or otherwise kept, under the key asked for."""
        others = dict(house.others())
        identity = {"tokens": house.identity, "model": others["weights"], "codec": others["codec"]}[other]
        impostor = house.entry(2 if other == "tokens" else 1, identity=identity)
        tier, key = make_tier(), house.entry(1).info.key
        tier.put(Entry(dataclasses.replace(impostor.info, key=key), impostor.kv, impostor.sensitivity))
        assert tier.lease(house.identity, ids_of(1)) is None
        assert tier.stats().damaged == 1
        assert not tier.contains(key)
        assert "not those asked for" in caplog.text

    def test_evicts_the_least_recently_used(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier(room=2)
        tier.put(house.entry(1))
        tier.put(house.entry(2))
        tier.lease(house.identity, ids_of(1)).close()  # type: ignore[union-attr]
        tier.put(house.entry(3))
        held = {number for number in (1, 2, 3) if tier.contains(house.entry(number).info.key)}
        assert held == {1, 3}
        assert tier.stats().evictions == 1

    def test_never_evicts_what_is_leased(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier(room=1)
        tier.put(house.entry(1))
        with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
            assert not tier.put(house.entry(2))
            assert same(read_all(lease), kept(house.entry(1)))
        assert tier.put(house.entry(2))
        assert not tier.contains(house.entry(1).info.key)

    def test_refuses_what_is_larger_than_itself(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier(room=1)
        tier.put(house.entry(1))
        assert not tier.put(house.entry(2, layers=64))
        assert tier.contains(house.entry(1).info.key)

    def test_a_second_put_changes_nothing(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier()
        assert tier.put(house.entry(1))
        before = tier.stats()
        assert tier.put(house.entry(1))
        assert tier.stats() == before

    def test_deleted_is_gone_but_an_open_lease_stays_readable(self, house: House, make_tier: MakeTier) -> None:
        tier, key = make_tier(), house.entry(1).info.key
        tier.put(house.entry(1))
        with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
            assert tier.delete(key)
            assert not tier.delete(key)
            assert not tier.contains(key)
            assert tier.lease(house.identity, ids_of(1)) is None
            assert same(read_all(lease), kept(house.entry(1)))
        assert tier.stats().used_bytes == 0

    def test_a_lease_of_a_deleted_entry_does_not_unpin_its_successor(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier(room=1)
        tier.put(house.entry(1))
        old = tier.lease(house.identity, ids_of(1))
        tier.delete(house.entry(1).info.key)
        tier.put(house.entry(1))
        with tier.lease(house.identity, ids_of(1)):  # type: ignore[union-attr]
            old.close()  # type: ignore[union-attr]
            assert not tier.put(house.entry(2))

    def test_closing_a_lease_or_a_tier_twice_is_harmless(self, house: House, make_tier: MakeTier) -> None:
        tier = make_tier()
        tier.put(house.entry(1))
        lease = tier.lease(house.identity, ids_of(1))
        lease.close()  # type: ignore[union-attr]
        lease.close()  # type: ignore[union-attr]
        tier.close()
        tier.close()

    def test_reading_and_storing_write_to_nobodys_tensor(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), house.entry(1)
        before = digest(entry.kv, entry.sensitivity)
        tier.put(entry)
        for _ in range(2):
            with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
                read_all(lease)
                assert same(read_all(lease), kept(entry))
        assert digest(entry.kv, entry.sensitivity) == before

    def test_a_view_of_a_larger_tensor_is_kept_as_its_own_bytes_alone(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), house.entry(1)
        large = torch.cat([entry.kv, entry.kv], dim=3)  # twice the tokens
        view = type(entry)(entry.info, large[:, :, :, :4], entry.sensitivity)
        tier.put(view)
        large.zero_()
        with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
            assert same(read_all(lease), kept(entry))

    def test_gc_drops_what_it_is_told_and_says_how_much(self, house: House, make_tier: MakeTier) -> None:
        tier, other = make_tier(), dict(house.others())["weights"]
        tier.put(house.entry(1))
        tier.put(house.entry(2, identity=other))
        before = tier.stats().used_bytes
        freed = tier.gc(lambda identity: identity == house.identity)
        assert freed == before - tier.stats().used_bytes == before / 2
        assert [info.identity for info in tier.infos()] == [house.identity]

    def test_counts_what_it_holds_and_did(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(room=3), house.entry(1)
        tier.put(entry)
        with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
            read_all(lease)
        stats = tier.stats()
        assert (stats.entries, stats.hits, stats.misses, stats.damaged) == (1, 1, 0, 0)
        assert stats.read_bytes == EncodedEntry.of(entry).stored_bytes
        assert 0 < stats.used_bytes == stats.written_bytes <= stats.capacity_bytes

    def test_a_lease_counts_the_bytes_it_reads(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), house.entry(1)
        tier.put(entry)
        with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
            read_all(lease)
            assert tier.stats().read_bytes == lease.stored_bytes == EncodedEntry.of(entry).stored_bytes

    def test_a_copy_for_another_tier_is_what_is_held_not_rounded_again(self, house: House, make_tier: MakeTier) -> None:
        first, second, entry = make_tier(), make_tier(), house.entry(1, tokens=64)
        first.put(entry)
        with first.lease(house.identity, entry.info.token_ids) as lease:  # type: ignore[union-attr]
            copy = lease.read_encoded()
        assert (copy.codec, copy.stored_bytes) == (EncodedEntry.of(entry).codec, EncodedEntry.of(entry).stored_bytes)
        second.put(copy)
        assert second.stats().used_bytes == first.stats().used_bytes
        with second.lease(house.identity, entry.info.token_ids) as lease:  # type: ignore[union-attr]
            assert same(read_all(lease), kept(entry))

    def test_a_copy_can_be_read_when_the_lease_is_closed_and_the_entry_gone(
        self, house: House, make_tier: MakeTier
    ) -> None:
        tier, entry = make_tier(), house.entry(1)
        tier.put(entry)
        with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
            copy = lease.read_encoded()
        tier.delete(entry.info.key)
        tier.close()
        assert torch.equal(copy.read_layer(1), kept(entry).kv[1])

    @pytest.mark.parametrize("tokens", [1, 3, 100, 300])  # layers that end within a page, and beyond one
    def test_any_length_comes_back_into_any_buffer(self, house: House, make_tier: MakeTier, tokens: int) -> None:
        tier, entry = make_tier(), house.entry(1, tokens=tokens)
        tier.put(entry)
        whole = torch.zeros(entry.kv[0].numel() + 1, dtype=entry.kv.dtype)
        unaligned = whole[1:].view(entry.kv[0].shape)
        strided = torch.zeros(2, 1, 8, tokens, dtype=entry.kv.dtype).transpose(2, 3)
        with tier.lease(house.identity, entry.info.token_ids) as lease:  # type: ignore[union-attr]
            for out in (unaligned, strided, aligned_empty(entry.kv[0].shape, entry.kv.dtype), None):
                assert torch.equal(lease.read_layer(0, out), kept(entry).kv[0])
        assert tier.stats().damaged == 0

    def test_layers_read_at_once_are_the_layers(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), house.entry(1)
        tier.put(entry)
        with tier.lease(house.identity, entry.info.token_ids) as lease:  # type: ignore[union-attr]
            layers = lease.read_layers(0, [None, torch.empty_like(entry.kv[1])])
            assert torch.equal(torch.stack(layers), kept(entry).kv)
            assert tier.stats().read_bytes == lease.stored_bytes

    def test_what_int8_cannot_tell_is_kept_as_it_is(self, house: House, make_tier: MakeTier) -> None:
        tier, entry = make_tier(), house.entry(1)
        entry.kv[1, 1, 0, 2, 3] = torch.inf
        tier.put(entry)
        with tier.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
            assert same(read_all(lease), entry)
            assert lease.stored_bytes == entry.kv.nbytes


def test_a_reader_beside_the_writer_reads_every_codec(house: House, tmp_path: Path) -> None:
    writer = DiskTier(tmp_path, 10**6, LRU())
    writer.put(house.entry(1))
    reader = ReadOnlyDiskTier(tmp_path, direct=True)
    with reader.lease(house.identity, ids_of(1)) as lease:  # type: ignore[union-attr]
        assert same(read_all(lease), kept(house.entry(1)))
    reader.close()
    writer.close()
