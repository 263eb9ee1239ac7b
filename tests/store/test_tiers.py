"""The contract of a tier, tested for every tier and every codec."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from ragkv.config import StoreConfig
from ragkv.registry import CODECS, TIERS, TierRow
from ragkv.store import opening
from ragkv.store.entry import Entry, Identity
from ragkv.store.opening import open_store
from ragkv.store.policies import LRU
from ragkv.store.store import Store
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import DiskTier, MemoryTier, Tier, TierKind
from tests.cluster.helpers import counted, remote_tier

from .entries import (
    as_stored,
    digest,
    hint_of,
    ids_of,
    leased,
    make_entry,
    other_identities,
    read_all,
    same,
    stored_bytes,
    with_codec,
)
from .toy_tier import ToyTier

MakeEntry = Callable[..., Entry]
MakeTier = Callable[..., Tier]


@pytest.fixture(params=sorted(CODECS))
def identity(request: pytest.FixtureRequest) -> Identity:
    return with_codec(request.param)


@pytest.fixture
def entry_of(identity: Identity) -> MakeEntry:
    """`make_entry` for one codec."""
    return partial(make_entry, identity=identity)


def _file_bytes(entry: Entry) -> float:
    """Bytes of its record; another entry of its shape may have a few bytes more."""
    return 1.02 * len(stored_bytes(entry))


# By name: opens a tier with room for `capacity` entries like the given one. A tier of shared
# storage bounds itself; its server is a fixture.
MAKERS: dict[str, Callable[[pytest.FixtureRequest, Path, Entry, float], Tier]] = {
    "memory": lambda _, __, entry, capacity: MemoryTier(
        int(capacity * stored_form(entry).size_bytes), LRU()
    ),
    "disk": lambda _, folder, entry, capacity: DiskTier(
        folder, int(capacity * _file_bytes(entry)), LRU()
    ),
    "redis": lambda request, *_: remote_tier(request.getfixturevalue("redis_server")),
    "s3": lambda request, *_: remote_tier(request.getfixturevalue("s3_server")),
    "toy": lambda _, __, entry, capacity: ToyTier(int(capacity * _file_bytes(entry))),
}


def test_the_contract_runs_over_every_tier() -> None:
    assert set(MAKERS) - {"toy"} == set(TIERS)


@pytest.fixture(params=MAKERS)
def make_tier(
    request: pytest.FixtureRequest, entry_of: MakeEntry, tmp_path: Path
) -> Iterator[MakeTier]:
    """Opens tiers of one kind; `capacity`, of a tier of this machine, is in entries of the default
    size.
    """
    opened: list[Tier] = []

    def make(capacity: float = 100) -> Tier:
        folder = tmp_path / str(len(opened))
        opened.append(MAKERS[request.param](request, folder, entry_of(), capacity))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(make_tier: MakeTier, entry_of: MakeEntry) -> Tier:
    """A tier that holds `entry_of(1)`."""
    made = make_tier()
    assert made.put(stored_form(entry_of(1)))
    return made


@pytest.fixture
def small_tier(make_tier: MakeTier, entry_of: MakeEntry) -> Tier:
    """A tier that holds `entry_of(1)` and is full with it."""
    made = make_tier(capacity=1)
    assert made.put(stored_form(entry_of(1)))
    return made


# shared storage bounds itself
bounded = pytest.mark.parametrize("make_tier", ["memory", "disk"], indirect=True)


def test_a_profile_measures_an_empty_tier_of_every_kind_whose_reads_it_must_know(
    entry_of: MakeEntry, tier: Tier, tmp_path: Path
) -> None:
    with ExitStack() as closed:
        scratch = tier.scratch(tmp_path / "scratch")
        assert (scratch is None) == (tier.is_remote or tier.kind == TierKind.MEMORY)
        if scratch is not None:
            closed.callback(scratch.close)
            assert (type(scratch), scratch.stats().entries) == (type(tier), 0)
            assert scratch.put(stored_form(entry_of(1))) and tier.contains(entry_of(1).info.key)


def test_a_lease_returns_the_bytes_and_the_info_that_were_put(
    entry_of: MakeEntry, make_tier: MakeTier
) -> None:
    tier = make_tier()
    entry = entry_of(7, group="talk", index=3)
    assert tier.put(stored_form(entry))
    with leased(tier, entry_of(7)) as lease:
        assert same(read_all(lease), as_stored(entry))


def test_a_read_fills_the_given_buffer_or_returns_a_view(
    entry_of: MakeEntry, make_tier: MakeTier
) -> None:
    tier = make_tier()
    entry = entry_of(1)
    tier.put(stored_form(entry))
    out = torch.zeros_like(entry.kv[0])
    with leased(tier, entry) as lease:
        got = lease.read_layer(1, out)
    assert torch.equal(got, as_stored(entry).kv[1])
    assert got.data_ptr() == (entry.kv[1] if lease.in_place else out).data_ptr()


def test_unknown_tokens_are_a_miss(identity: Identity, tier: Tier) -> None:
    assert tier.lease(identity, ids_of(2)) is None
    assert tier.stats().misses == 1


def test_a_lookup_with_any_other_identity_is_a_miss(identity: Identity, tier: Tier) -> None:
    for field, other in other_identities(identity):
        assert tier.lease(other, ids_of(1)) is None, field


@pytest.mark.parametrize("other", ["tokens", "model", "codec"])
def test_an_equal_key_with_another_identity_or_other_tokens_is_damage(
    identity: Identity,
    entry_of: MakeEntry,
    make_tier: MakeTier,
    other: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An entry with other tokens, of another model or in another codec is stored under the key of
    the lookup.
    """
    others = dict(other_identities(identity))
    wrong = {"tokens": identity, "model": others["weights"], "codec": others["codec"]}[other]
    impostor = entry_of(2 if other == "tokens" else 1, identity=wrong)
    tier = make_tier()
    key = entry_of(1).info.key
    tier.put(stored_form(Entry(dataclasses.replace(impostor.info, key=key), impostor.kv)))
    assert tier.lease(identity, ids_of(1)) is None
    assert tier.stats().damaged == 1
    assert not tier.contains(key)
    assert "not those asked for" in caplog.text


@bounded
def test_a_full_tier_evicts_the_least_recently_used_entry(
    entry_of: MakeEntry, make_tier: MakeTier
) -> None:
    tier = make_tier(capacity=2)
    tier.put(stored_form(entry_of(1)))
    tier.put(stored_form(entry_of(2)))
    leased(tier, entry_of(1)).close()
    tier.put(stored_form(entry_of(3)))
    held = {number for number in (1, 2, 3) if tier.contains(entry_of(number).info.key)}
    assert held == {1, 3}
    assert tier.stats().evictions == 1


@bounded
def test_a_leased_entry_is_never_evicted(entry_of: MakeEntry, small_tier: Tier) -> None:
    with leased(small_tier, entry_of(1)) as lease:
        assert not small_tier.put(stored_form(entry_of(2)))
        assert same(read_all(lease), as_stored(entry_of(1)))
    assert small_tier.put(stored_form(entry_of(2)))
    assert not small_tier.contains(entry_of(1).info.key)


@bounded
def test_an_entry_larger_than_the_tier_is_refused_and_evicts_nothing(
    entry_of: MakeEntry, small_tier: Tier
) -> None:
    assert not small_tier.put(stored_form(entry_of(2, layers=64)))
    assert small_tier.contains(entry_of(1).info.key)


def test_a_second_put_changes_nothing(entry_of: MakeEntry, tier: Tier) -> None:
    before = counted(tier)
    assert tier.put(stored_form(entry_of(1)))
    assert counted(tier) == before


@bounded
def test_a_deleted_entry_is_gone_but_its_open_lease_stays_readable(
    identity: Identity, entry_of: MakeEntry, tier: Tier
) -> None:
    key = entry_of(1).info.key
    with leased(tier, entry_of(1)) as lease:
        assert tier.delete(key)
        assert not tier.delete(key)
        assert not tier.contains(key)
        assert tier.lease(identity, ids_of(1)) is None
        assert same(read_all(lease), as_stored(entry_of(1)))
    assert counted(tier).used_bytes == 0


@bounded
def test_a_lease_of_a_deleted_entry_does_not_unpin_its_successor(
    entry_of: MakeEntry, small_tier: Tier
) -> None:
    old = leased(small_tier, entry_of(1))
    small_tier.delete(entry_of(1).info.key)
    small_tier.put(stored_form(entry_of(1)))
    with leased(small_tier, entry_of(1)):
        old.close()
        assert not small_tier.put(stored_form(entry_of(2)))


def test_closing_a_lease_or_a_tier_twice_is_harmless(entry_of: MakeEntry, tier: Tier) -> None:
    lease = leased(tier, entry_of(1))
    lease.close()
    lease.close()
    tier.close()  # its fixture closes it again


def test_putting_and_reading_do_not_modify_the_entry(
    entry_of: MakeEntry, make_tier: MakeTier
) -> None:
    tier = make_tier()
    entry = entry_of(1)
    before = digest(entry.kv)
    tier.put(stored_form(entry))
    for _ in range(2):
        with leased(tier, entry_of(1)) as lease:
            read_all(lease)
            assert same(read_all(lease), as_stored(entry))
    assert digest(entry.kv) == before


def test_a_view_of_a_larger_tensor_is_stored_without_the_larger_tensor(
    entry_of: MakeEntry, make_tier: MakeTier
) -> None:
    tier = make_tier()
    entry = entry_of(1)
    large = torch.cat([entry.kv, entry.kv], dim=3)  # twice the tokens
    view = type(entry)(entry.info, large[:, :, :, :4])
    tier.put(stored_form(view))
    large.zero_()
    with leased(tier, entry_of(1)) as lease:
        assert same(read_all(lease), as_stored(entry))


def test_gc_drops_the_refused_identities_and_returns_the_bytes_freed(
    identity: Identity, entry_of: MakeEntry, tier: Tier
) -> None:
    tier.put(stored_form(entry_of(2, identity=dict(other_identities(identity))["weights"])))
    before = counted(tier).used_bytes
    store = Store([tier], write_buffer_bytes=0)
    freed = store.contents.gc(lambda found: found == identity)
    left = counted(tier).used_bytes
    assert left < 0.6 * before
    assert freed == (0 if tier.is_remote else before - left)
    assert [info.identity for info in tier.infos()] == [identity]
    store.close()


def test_stats_count_entries_lookups_and_bytes(entry_of: MakeEntry, make_tier: MakeTier) -> None:
    tier = make_tier(capacity=3)
    entry = entry_of(1)
    tier.put(stored_form(entry))
    with leased(tier, entry_of(1)) as lease:
        read_all(lease)
    stats = counted(tier)
    assert (stats.entries, stats.hits, stats.misses, stats.damaged) == (1, 1, 0, 0)
    assert stats.read_bytes == stored_form(entry).size_bytes
    assert 0 < stats.written_bytes <= stats.used_bytes  # Redis counts its own overhead
    assert tier.is_remote or stats.used_bytes == stats.written_bytes <= (stats.capacity_bytes or 0)


def test_a_copy_for_another_tier_keeps_its_encoded_form_and_is_not_rounded_again(
    entry_of: MakeEntry, make_tier: MakeTier
) -> None:
    first = make_tier()
    second = make_tier()
    entry = entry_of(1, tokens=64)
    first.put(stored_form(entry))
    with leased(first, entry) as lease:
        copy = lease.read_entry()
    assert (copy.codec, copy.size_bytes) == (
        stored_form(entry).codec,
        stored_form(entry).size_bytes,
    )
    second.put(stored_form(copy))
    assert second.stats().written_bytes == first.stats().written_bytes
    with leased(second, entry) as lease:
        assert same(read_all(lease), as_stored(entry))


def test_a_copy_stays_readable_after_its_lease_is_closed_and_its_entry_deleted(
    entry_of: MakeEntry, tier: Tier
) -> None:
    with leased(tier, entry_of(1)) as lease:
        copy = lease.read_entry()
    tier.delete(entry_of(1).info.key)
    tier.close()
    assert torch.equal(copy.read_layer(1), as_stored(entry_of(1)).kv[1])


@pytest.mark.parametrize("tokens", [1, 300])  # layers that end within a page, and beyond one
def test_layers_of_any_length_can_be_read_into_any_buffer(
    entry_of: MakeEntry, make_tier: MakeTier, tokens: int
) -> None:
    tier = make_tier()
    entry = entry_of(1, tokens=tokens)
    tier.put(stored_form(entry))
    whole = torch.zeros(entry.kv[0].numel() + 1, dtype=entry.kv.dtype)
    unaligned = whole[1:].view(entry.kv[0].shape)
    strided = torch.zeros(2, 1, 8, tokens, dtype=entry.kv.dtype).transpose(2, 3)
    with leased(tier, entry) as lease:
        for out in (unaligned, strided, None):
            assert torch.equal(lease.read_layer(0, out), as_stored(entry).kv[0])
    assert tier.stats().damaged == 0


def test_an_entry_that_int8_refuses_is_stored_unchanged(
    entry_of: MakeEntry, make_tier: MakeTier
) -> None:
    tier = make_tier()
    entry = entry_of(1)
    entry.kv[1, 1, 0, 2, 3] = torch.inf
    tier.put(stored_form(entry))
    with leased(tier, entry_of(1)) as lease:
        assert same(read_all(lease), entry)
        assert lease.stored_bytes == entry.kv.nbytes


def test_the_toy_tier_drops_what_was_put_first_and_counts_it(entry_of: MakeEntry) -> None:
    toy = ToyTier(int(2.5 * _file_bytes(entry_of(0))))
    assert all(toy.put(stored_form(entry_of(n))) for n in range(3))
    assert [toy.contains(entry_of(n).info.key) for n in range(3)] == [False, True, True]
    assert (toy.stats().entries, toy.stats().evictions) == (2, 1)


def test_a_damaged_record_of_the_toy_tier_is_named_without_its_info(entry_of: MakeEntry) -> None:
    toy = ToyTier(1 << 20)
    key = entry_of(1).info.key
    assert toy.put(stored_form(entry_of(1)))
    toy._records[key] = b"damaged"
    assert list(toy.scan()) == [(key, None)]


def test_a_tier_of_one_file_and_one_row_is_opened_from_settings_and_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of docs/extending.md: nothing else has to know the toy tier. Here it takes the
    place of the disk.
    """
    row = TierRow("directory", "tests.store.toy_tier:open_toy")
    monkeypatch.setattr(opening, "TIERS", {"memory": TIERS["memory"], "toy": row})
    config = StoreConfig(directory=str(tmp_path), memory_bytes=2 * make_entry().size_bytes)
    with open_store(config) as store:
        memory, toy = store.tiers
        assert isinstance(toy, ToyTier)
        for number in range(5):  # written in the background
            store.put(make_entry(number))
        store.flush()
        assert store.stats().tiers[1].entries == 5
        with leased(store, make_entry(0)) as lease:
            assert lease.kind == "toy"
            assert same(read_all(lease), make_entry(0))
        store.flush()
        assert memory.contains(make_entry(0).info.key)  # copied up
        store.prefetcher.queued(hint_of(1))
        store.flush()
        assert memory.contains(make_entry(1).info.key)  # fetched ahead
        assert store.delete(make_entry(1).info.key)
        assert not store.contains(make_entry(1).info.key)
        store.contents.gc(lambda _: False)
        assert toy.stats().entries == 0
