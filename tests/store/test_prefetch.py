"""What the store does for those who wait: fetches in order, spares, keeps room, stops at once, and leaks nothing."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv.config import StoreConfig
from ragkv.errors import ConfigError
from ragkv.store import (
    LRU,
    DiskTier,
    HintedEntry,
    Lease,
    MemoryTier,
    Policy,
    PrefetchHint,
    Store,
    TierKind,
    make_policy,
)
from ragkv.store.policies import Cut, PolicySettings
from ragkv.testing import FailingTier, Failure, WrappedLease, WrappedTier

from .entries import IDENTITY, ids_of, make_entry, read_all, same

SIZE = make_entry().size_bytes


class GatedTier(WrappedTier):
    """Every layer that is read is noted, and waits for `go`."""

    def __init__(self, tier: DiskTier) -> None:
        super().__init__(tier)
        self.go = threading.Event()
        self.go.set()
        self.reads: list[tuple[str, int]] = []

    def wrap(self, lease: Lease) -> Lease:
        return _GatedLease(lease, self)

    @property
    def keys(self) -> list[str]:
        """Whose first layer was read, in order."""
        return [key for key, layer in self.reads if layer == 0]


class _GatedLease(WrappedLease):
    def __init__(self, lease: Lease, tier: GatedTier) -> None:
        super().__init__(lease)
        self._tier = tier

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        self._tier.reads.append((self.info.key, layer))
        assert self._tier.go.wait(20)
        return self.lease.read_layer(layer, out)


class House:
    """A store of memory for some entries above a gated disk that has `on_disk` of them."""

    def __init__(
        self, directory: Path, fits: float, on_disk: int, policy: Policy | None = None, reserve: float = 0
    ) -> None:
        self.memory = MemoryTier(int(fits * SIZE), policy or make_policy("lookahead"))
        self.files = DiskTier(directory, 10**7, LRU())
        for number in range(on_disk):
            assert self.files.put(make_entry(number))
        self.disk = GatedTier(self.files)
        self.store = Store([self.memory, self.disk], write_buffer_bytes=10**6, memory_reserve_bytes=int(reserve * SIZE))

    def in_memory(self) -> set[int]:
        """Numbers of the entries memory holds."""
        return {info.token_ids[0] // 1000 for info in self.memory.infos()}

    def pins(self) -> int:
        """Open leases."""
        return sum(slot.pins for tier in (self.memory, self.files) for slot in tier._ledger)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    houses: list[House] = []

    def build(*args: Any, **kwargs: Any) -> House:
        houses.append(House(tmp_path / str(len(houses)), *args, **kwargs))
        return houses[-1]

    yield build
    for built in houses:
        built.disk.go.set()
        built.store.close()
        assert built.pins() == 0


def hint_of(*numbers: int, group: str = "") -> PrefetchHint:
    return PrefetchHint(tuple(HintedEntry(IDENTITY, tuple(ids_of(number)), SIZE, group) for number in numbers))


def key(number: int) -> str:
    return make_entry(number).info.key


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.001)


def settled(house: House) -> None:
    """Return when the prefetcher has looked at the line as it is and has nothing under way."""
    line = house.store._prefetcher
    asked = hint_of()
    house.store.queued(asked)
    house.store.left(asked)
    until(lambda: line._seen == line._version)
    time.sleep(0.05)


class TestFetching:
    def test_brings_what_fits_in_the_lines_order_and_the_next_when_there_is_room(
        self, house: Callable[..., House]
    ) -> None:
        here = house(fits=3, on_disk=6)
        here.disk.go.clear()
        demands = [hint_of(number) for number in (4, 2, 0, 1, 3)]
        for waiting in demands:
            here.store.queued(waiting)
        here.disk.go.set()
        until(lambda: here.in_memory() == {4, 2, 0})
        settled(here)
        assert here.disk.keys == [key(4), key(2), key(0)]
        here.store.started(demands[0])
        here.store.left(demands[0])
        until(lambda: here.in_memory() == {2, 0, 1})
        assert here.disk.keys == [key(number) for number in (4, 2, 0, 1)]
        assert here.store.stats().prefetched == 4

    def test_gives_a_request_that_waited_hits_in_memory_equal_in_every_bit(self, house: Callable[..., House]) -> None:
        here = house(fits=4, on_disk=2)
        waiting = hint_of(0, 1)
        here.store.queued(waiting)
        until(lambda: here.in_memory() == {0, 1})
        here.store.started(waiting)
        for number in (0, 1):
            with here.store.lease(IDENTITY, ids_of(number)) as lease:  # type: ignore[union-attr]
                assert lease.kind is TierKind.MEMORY
                assert same(read_all(lease), make_entry(number))
        here.store.left(waiting)

    def test_reads_nothing_that_is_in_memory(self, house: Callable[..., House]) -> None:
        here = house(fits=4, on_disk=0)
        here.store.put(make_entry(1))
        here.store.flush()
        here.store.queued(hint_of(1))
        settled(here)
        assert here.disk.reads == []

    def test_brings_back_what_still_waits_to_be_written(self, house: Callable[..., House]) -> None:
        here = house(fits=1, on_disk=0)
        writing = threading.Event()
        put, here.disk.put = here.disk.put, lambda entry: writing.wait(20) and put(entry)  # type: ignore[method-assign]
        here.store.put(make_entry(1))
        here.store.put(make_entry(2))
        assert here.in_memory() == {2}
        here.store.queued(hint_of(1))
        until(lambda: here.in_memory() == {1})
        writing.set()

    def test_takes_part_of_a_demand_that_does_not_fit_as_a_whole(self, house: Callable[..., House]) -> None:
        here = house(fits=2.5, on_disk=5)
        here.store.queued(hint_of(0, 1, 2, 3, group="s"))
        until(lambda: here.in_memory() == {0, 1})
        settled(here)
        assert len(here.disk.keys) == 2

    def test_can_be_switched_off(self, tmp_path: Path) -> None:
        with Store.open(StoreConfig(directory=str(tmp_path), prefetch=False)) as store:
            store._tiers[1].put(make_entry(1))
            store.queued(hint_of(1))
            time.sleep(0.1)
            assert store.stats().tiers[0].entries == 0

    def test_a_place_in_line_is_left_once(self, house: Callable[..., House]) -> None:
        here = house(fits=2, on_disk=1)
        waiting = hint_of(0)
        here.store.queued(waiting)
        here.store.left(waiting)
        here.store.left(waiting)
        here.store.started(waiting)
        assert here.store._prefetcher.waiting == 0


class TestStopping:
    @pytest.mark.parametrize("how", ["left", "started"])
    def test_a_fetch_nobody_waits_for_ends_at_the_next_layer(self, house: Callable[..., House], how: str) -> None:
        here = house(fits=4, on_disk=2)
        here.disk.go.clear()
        waiting = hint_of(0, 1)
        here.store.queued(waiting)
        until(lambda: here.disk.reads == [(key(0), 0)])
        getattr(here.store, how)(waiting)
        here.disk.go.set()
        settled(here)
        assert here.disk.reads == [(key(0), 0)]
        assert (here.in_memory(), here.pins()) == (set(), 0)

    def test_closing_ends_the_fetch_under_way(self, house: Callable[..., House]) -> None:
        before = set(threading.enumerate())
        here = house(fits=4, on_disk=2, reserve=1)
        here.disk.go.clear()
        here.store.queued(hint_of(0, 1))
        until(lambda: here.disk.reads == [(key(0), 0)])
        closing = threading.Thread(target=here.store.close)
        closing.start()
        until(lambda: here.store._prefetcher._closing)
        here.disk.go.set()
        closing.join(20)
        assert here.disk.reads == [(key(0), 0)]
        assert set(threading.enumerate()) <= before

    def test_what_is_deleted_during_its_fetch_stays_deleted(self, house: Callable[..., House]) -> None:
        here = house(fits=4, on_disk=1)
        here.disk.go.clear()
        here.store.queued(hint_of(0))
        until(lambda: here.disk.reads == [(key(0), 0)])
        assert here.store.delete(IDENTITY, ids_of(0))
        here.disk.go.set()
        settled(here)
        assert here.disk.reads == [(key(0), 0), (key(0), 1)]  # the open file is read to its end
        assert not here.store.contains(key(0))


class TestFailing:
    @pytest.mark.parametrize("failure", list(Failure))
    def test_an_entry_that_cannot_be_read_is_tried_once_and_the_rest_goes_on(
        self, tmp_path: Path, failure: Failure, caplog: pytest.LogCaptureFixture
    ) -> None:
        files = DiskTier(tmp_path, 10**7, LRU())
        assert files.put(make_entry(0, layers=3)) and files.put(make_entry(1))
        disk = FailingTier(files, layers=[2], failure=failure)
        with Store([MemoryTier(10**6, make_policy("lookahead")), disk], write_buffer_bytes=10**6) as store:
            store.queued(hint_of(0, 1))
            until(lambda: store.stats().tiers[0].entries == 1)
            for _ in range(3):
                store.queued(hint_of())
            time.sleep(0.05)
            assert caplog.text.count("could not be fetched ahead") == 1
            assert [info.key for info in store._tiers[0].infos()] == [key(1)]
            assert files.contains(key(0)) == (failure is Failure.BROKEN)
            assert sum(slot.pins for slot in files._ledger) == 0

    def test_a_flipped_byte_never_reaches_memory(self, house: Callable[..., House], tmp_path: Path) -> None:
        here = house(fits=4, on_disk=1)
        (file,) = tmp_path.glob("0/entries/*/*.safetensors")
        data = bytearray(file.read_bytes())
        data[2 * 4096 + 5] ^= 1  # in layer 0
        file.write_bytes(data)
        here.store.queued(hint_of(0))
        until(lambda: not here.files.contains(key(0)))
        assert here.in_memory() == set()
        assert here.store.lease(IDENTITY, ids_of(0)) is None

    def test_what_nobody_has_is_looked_for_once(self, house: Callable[..., House]) -> None:
        here = house(fits=4, on_disk=0)
        here.store.queued(hint_of(7))
        settled(here)
        settled(here)
        assert here.files.stats().misses == 1


class TestSparing:
    def test_a_fetch_evicts_nothing_a_request_before_it_needs_under_any_policy(
        self, house: Callable[..., House]
    ) -> None:
        here = house(fits=2, on_disk=3, policy=LRU())
        here.memory.put(make_entry(0))  # the least recently used, and the first in line needs it
        here.memory.put(make_entry(1))
        here.store.queued(hint_of(0))
        here.store.queued(hint_of(2))
        until(lambda: here.in_memory() == {0, 2})

    def test_a_fetch_evicts_nothing_in_use(self, house: Callable[..., House]) -> None:
        here = house(fits=2, on_disk=3)
        here.memory.put(make_entry(0))
        here.memory.put(make_entry(1))
        with here.store.lease(IDENTITY, ids_of(0)), here.store.lease(IDENTITY, ids_of(1)):  # type: ignore[union-attr]
            here.store.queued(hint_of(2))
            settled(here)
            assert here.in_memory() == {0, 1}

    def test_who_waits_keeps_what_it_needs_however_much_is_put(self, house: Callable[..., House]) -> None:
        here = house(fits=4, on_disk=0)
        waiting = [hint_of(0, 1, group="s"), hint_of(2)]
        for number, group in ((0, "s"), (1, "s"), (2, ""), (3, "")):
            here.store.put(make_entry(number, group=group, index=number))
        for each in waiting:
            here.store.queued(each)
        for number in range(10, 30):
            here.store.put(make_entry(number))
        assert here.in_memory() == {0, 1, 2, 29}
        here.store.started(waiting[0])
        for number in range(30, 40):
            here.store.put(make_entry(number))
        assert {0, 1, 2} < here.in_memory()  # until it has opened what it needs
        for each in waiting:
            here.store.left(each)
        for number in range(40, 50):
            here.store.put(make_entry(number))
        assert here.in_memory().isdisjoint({0, 1, 2})

    def test_a_cancelled_request_exempts_nothing_and_others_still_do(self, house: Callable[..., House]) -> None:
        here = house(fits=2, on_disk=0)
        here.store.put(make_entry(0))
        first, second = hint_of(0), hint_of(0)
        here.store.queued(first)
        here.store.queued(second)
        here.store.left(first)
        for number in range(10, 15):
            here.store.put(make_entry(number))
        assert 0 in here.in_memory()
        here.store.left(second)
        for number in range(15, 20):
            here.store.put(make_entry(number))
        assert 0 not in here.in_memory()


class TestTheReserve:
    def test_is_kept_free(self, house: Callable[..., House]) -> None:
        here = house(fits=8, on_disk=0, reserve=2)
        for number in range(30):
            here.store.put(make_entry(number))
        until(lambda: here.memory.stats().used_bytes <= 6 * SIZE)
        assert here.in_memory() == set(range(24, 30))

    def test_is_no_room_to_fetch_into(self, house: Callable[..., House]) -> None:
        here = house(fits=4, on_disk=6, reserve=2)
        here.store.queued(hint_of(0, 1, 2, 3))
        until(lambda: here.in_memory() == {0, 1})
        settled(here)
        assert here.in_memory() == {0, 1}

    def test_takes_nothing_in_use(self, house: Callable[..., House]) -> None:
        here = house(fits=2, on_disk=0, reserve=2)
        memory = here.memory
        memory.put(make_entry(0))
        with here.store.lease(IDENTITY, ids_of(0)):  # type: ignore[union-attr]
            memory.free(2 * SIZE)
            assert here.in_memory() == {0}
        memory.free(2 * SIZE)
        assert here.in_memory() == set()

    def test_is_a_sixteenth_where_nothing_else_is_said_and_none_without_a_disk(self, tmp_path: Path) -> None:
        with Store.open(StoreConfig(directory=str(tmp_path), memory_bytes=1600)) as store:
            assert store._prefetcher._reserve_bytes == 100
        with Store.open(StoreConfig(memory_bytes=1600)) as store:
            assert store._prefetcher._reserve_bytes == 0

    def test_larger_than_memory_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="memory_reserve_bytes is 11"):
            StoreConfig(memory_bytes=10, memory_reserve_bytes=11)


class TestLookAhead:
    def test_forgets_the_request_that_left_not_another_of_its_group(self) -> None:
        policy = make_policy("lookahead")
        for group in "ab":
            policy.held(group, 1, 1, 0.0)
        for group in "aba":
            policy.queued(group)
        policy.left("a", 0)  # what stays of a stands behind b
        assert policy.victim((), 1.0) == Cut("a", whole=True)
        policy.queued("b")
        policy.left("a", 0)
        policy.left("a", 0)  # never joined: ignored
        policy.left("b", 1)
        assert policy.victim({"a"}, 1.0) == Cut("b", whole=True)

    def test_keeps_the_place_of_a_group_whose_later_request_left(self) -> None:
        policy = make_policy("lookahead")
        for group in "ab":
            policy.held(group, 1, 1, 0.0)
        for group in "aba":
            policy.queued(group)
        policy.left("a", 1)  # a still stands before b
        assert policy.victim((), 1.0) == Cut("b", whole=True)

    def test_lets_those_behind_the_window_go_too(self) -> None:
        policy = make_policy("lookahead", PolicySettings(window_groups=1))
        for group in "abc":
            policy.held(group, 1, 1, 0.0)
            policy.queued(group)
        policy.left("b")
        policy.left("a")  # c comes into the window
        assert policy.victim((), 1.0) == Cut("b", whole=True)
        assert policy.victim({"a", "b"}, 1.0) == Cut("c", whole=True)

    def test_measures_its_window_by_what_is_held(self) -> None:
        policy = make_policy("lookahead", PolicySettings(window_bytes=20))
        for group in "abc":
            policy.held(group, 1, 10, 0.0)  # mean size 10: two sessions
            policy.queued(group)
        assert policy.victim((), 1.0) == Cut("c", whole=True)
        policy.left("a")
        policy.left("b")
        for group in "ab":
            policy.held(group, 0, 0, 1.0)
        policy.held("d", 1, 30, 1.0)  # mean size 20: one
        policy.queued("d")
        assert policy.victim((), 2.0) == Cut("d", whole=True)

    def test_counts_a_group_that_waits_twice_once(self) -> None:
        policy = make_policy("lookahead", PolicySettings(window_groups=2))
        for group in "abc":
            policy.held(group, 1, 1, 0.0)
        for group in "aaabc":
            policy.queued(group)
        assert policy.victim((), 1.0) == Cut("c", whole=True)


def test_many_threads_at_once_never_see_a_wrong_byte_and_leave_nothing(tmp_path: Path) -> None:
    """Tiers for a few entries, so that prefetch, promotion, eviction and deletion meet all the time."""
    entries = [make_entry(number, group="s" if number < 4 else "", index=number % 4) for number in range(16)]
    files = DiskTier(tmp_path, 10 * 4 * 4096, make_policy("lookahead"))
    memory = MemoryTier(5 * SIZE, make_policy("lookahead"))
    errors: list[BaseException] = []
    served = [0]

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(40):
                numbers = choose.sample(range(16), 3)
                waiting = PrefetchHint(
                    tuple(HintedEntry(IDENTITY, tuple(ids_of(n)), SIZE, "s" if n < 4 else "") for n in numbers)
                )
                store.queued(waiting)
                time.sleep(choose.random() / 500)
                if choose.random() < 0.7:
                    store.started(waiting)
                    for number in numbers:
                        lease = store.lease(IDENTITY, ids_of(number))
                        if lease is None:
                            store.put(entries[number])
                        else:
                            with lease:
                                assert same(read_all(lease), entries[number])
                            served[0] += 1
                store.left(waiting)
                if choose.random() < 0.1:
                    store.delete(IDENTITY, ids_of(numbers[0]))
        except BaseException as error:
            errors.append(error)

    with Store([memory, files], write_buffer_bytes=10**6, memory_reserve_bytes=SIZE) as store:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []
        store.flush()
        assert served[0] > 200
        assert store._prefetcher.waiting == 0
        for tier in (memory, files):
            assert tier.stats().used_bytes <= tier.stats().capacity_bytes
            assert tier.stats().damaged == 0
            assert sum(slot.pins for slot in tier._ledger) == 0
            policy: Any = tier._ledger.policy
            assert (policy._positions, list(policy._beyond)) == ({}, [])
