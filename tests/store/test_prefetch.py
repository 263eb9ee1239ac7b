"""The rules of prefetching: order, eviction, the reserve, stopping and failures."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.simulate.policies import WindowedLookAhead
from ragkv.config import StoreConfig
from ragkv.store import opening
from ragkv.store.entry import EntryKey, StoredEntry
from ragkv.store.policies import LRU, Eviction, Policy, make_policy
from ragkv.store.prefetch import HintedEntry, PrefetchHint
from ragkv.store.store import Store
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import DiskTier, Lease, MemoryTier, TierKind
from tests.scheduling.helpers import begin, together, until

from .entries import IDENTITY, hint_of, ids_of, make_entry, open_leases, read_all, same
from .fakes import FailingTier, Failure, WrappedLease, WrappedTier

SIZE = make_entry().size_bytes


class GatedTier(WrappedTier):
    """A tier that records every layer read and lets the read wait for `go`."""

    def __init__(self, tier: DiskTier) -> None:
        super().__init__(tier)
        self.go = threading.Event()
        self.go.set()
        self.reads: list[tuple[str, int]] = []

    def wrap(self, lease: Lease) -> Any:
        return _GatedLease(lease, self)

    @property
    def keys(self) -> list[str]:
        """The keys whose first layer was read, in order."""
        return [key for key, layer in self.reads if layer == 0]


class _GatedLease(WrappedLease):
    def __init__(self, lease: Lease, tier: GatedTier) -> None:
        super().__init__(lease)
        self._tier = tier

    def read_layer(self, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        self._tier.reads.append((self.info.key, layer))
        assert self._tier.go.wait(20)
        return self.lease.read_layer(layer, out)

    def read_entry(self) -> StoredEntry:
        for layer in range(self.info.layers):
            self.read_layer(layer)
        return self.lease.read_entry()


class GatedStore:
    """A store with memory for `fits` entries, above a gated disk that holds `on_disk` entries."""

    def __init__(self, directory: Path, fits: float, on_disk: int) -> None:
        self.memory = MemoryTier(int(fits * SIZE), make_policy("lookahead"))
        self.files = DiskTier(directory, 10**7, LRU())
        for number in range(on_disk):
            assert self.files.put(stored_form(make_entry(number)))
        self.disk = GatedTier(self.files)
        self.store = Store([self.memory, self.disk], write_buffer_bytes=10**6)

    def in_memory(self) -> set[int]:
        """Numbers of the entries in memory."""
        return {info.token_ids[0] // 1000 for info in self.memory.infos()}

    def pins(self) -> int:
        """Open leases."""
        return open_leases(self.memory, self.files)


OpenStore = Callable[..., GatedStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[GatedStore] = []

    def build(*args: Any, **kwargs: Any) -> GatedStore:
        opened.append(GatedStore(tmp_path / str(len(opened)), *args, **kwargs))
        return opened[-1]

    yield build
    for built in opened:
        built.disk.go.set()
        built.store.close()
        assert built.pins() == 0


def key(number: int) -> str:
    return make_entry(number).info.key


def test_entries_that_fit_are_fetched_in_queue_order_and_the_next_one_when_space_is_free(
    open_store: OpenStore,
) -> None:
    gated = open_store(fits=3, on_disk=6)
    gated.disk.go.clear()
    hints = [hint_of(number) for number in (4, 2, 0, 1, 3)]
    for waiting in hints:
        gated.store.prefetcher.queued(waiting)
    gated.disk.go.set()
    until(lambda: gated.in_memory() == {4, 2, 0})
    gated.store.flush()
    assert gated.disk.keys == [key(4), key(2), key(0)]
    gated.store.prefetcher.started(hints[0])
    gated.store.prefetcher.left(hints[0])
    until(lambda: gated.in_memory() == {2, 0, 1})
    assert gated.disk.keys == [key(number) for number in (4, 2, 0, 1)]
    assert gated.store.stats().prefetched == 4


def test_an_entry_that_waits_to_be_written_is_fetched_from_the_write_buffer(
    open_store: OpenStore,
) -> None:
    gated = open_store(fits=1, on_disk=0)
    writing = threading.Event()
    put, gated.disk.put = gated.disk.put, lambda entry: writing.wait(20) and put(entry)  # type: ignore[method-assign]
    gated.store.put(make_entry(1))
    gated.store.put(make_entry(2))
    assert gated.in_memory() == {2}
    gated.store.prefetcher.queued(hint_of(1))
    until(lambda: gated.in_memory() == {1})
    writing.set()


def test_prefetching_can_be_switched_off(tmp_path: Path) -> None:
    with opening.open_store(StoreConfig(directory=str(tmp_path), prefetch=False)) as store:
        store.tiers[1].put(stored_form(make_entry(1)))
        store.prefetcher.queued(hint_of(1))
        time.sleep(0.1)
        assert store.stats().tiers[0].entries == 0


@pytest.mark.parametrize("how", ["left", "started"])
def test_nothing_more_is_fetched_for_a_request_that_does_not_wait(
    open_store: OpenStore, how: str
) -> None:
    gated = open_store(fits=4, on_disk=2)
    gated.disk.go.clear()
    waiting = hint_of(0, 1)
    gated.store.prefetcher.queued(waiting)
    until(lambda: gated.disk.reads == [(key(0), 0)])
    getattr(gated.store.prefetcher, how)(waiting)
    gated.disk.go.set()
    gated.store.flush()
    assert gated.disk.keys == [key(0)]
    assert gated.pins() == 0


def test_closing_the_store_ends_the_prefetcher(open_store: OpenStore) -> None:
    before = set(threading.enumerate())
    gated = open_store(fits=4, on_disk=2)
    gated.disk.go.clear()
    gated.store.prefetcher.queued(hint_of(0, 1))
    until(lambda: gated.disk.reads == [(key(0), 0)])
    closing = begin(gated.store.close)
    closing.join(0.1)
    gated.disk.go.set()
    closing.join(20)
    assert gated.disk.keys == [key(0)]
    assert set(threading.enumerate()) <= before


def test_an_entry_deleted_during_its_fetch_stays_deleted(open_store: OpenStore) -> None:
    gated = open_store(fits=4, on_disk=1)
    gated.disk.go.clear()
    gated.store.prefetcher.queued(hint_of(0))
    until(lambda: gated.disk.reads == [(key(0), 0)])
    assert gated.store.delete(make_entry(0).info.key)
    gated.disk.go.set()
    gated.store.flush()
    assert gated.disk.reads == [(key(0), 0), (key(0), 1)]  # the open file is read to its end
    assert not gated.store.contains(key(0))


@pytest.mark.parametrize("failure", list(Failure))
def test_an_entry_that_cannot_be_read_is_tried_once_and_the_others_are_fetched(
    tmp_path: Path, failure: Failure, caplog: pytest.LogCaptureFixture
) -> None:
    files = DiskTier(tmp_path, 10**7, LRU())
    assert files.put(stored_form(make_entry(0, layers=3))) and files.put(stored_form(make_entry(1)))
    disk = FailingTier(files, layers=[2], failure=failure)
    with Store(
        [MemoryTier(10**6, make_policy("lookahead")), disk], write_buffer_bytes=10**6
    ) as store:
        store.prefetcher.queued(hint_of(0, 1))
        until(lambda: store.stats().tiers[0].entries == 1)
        for _ in range(3):
            store.prefetcher.queued(hint_of())
        time.sleep(0.05)
        assert caplog.text.count("could not be fetched ahead") == 1
        assert [info.key for info in store.tiers[0].infos()] == [key(1)]
        assert files.contains(key(0)) == (failure is Failure.BROKEN)
        assert open_leases(files) == 0


def test_a_fetch_evicts_nothing_that_an_earlier_request_needs(open_store: OpenStore) -> None:
    gated = open_store(fits=2, on_disk=3)
    # the least recently used, and the first request in the queue needs it
    gated.memory.put(stored_form(make_entry(0)))
    gated.memory.put(stored_form(make_entry(1)))
    gated.store.prefetcher.queued(hint_of(0))
    gated.store.prefetcher.queued(hint_of(2))
    until(lambda: gated.in_memory() == {0, 2})


def test_entries_of_a_waiting_request_are_not_evicted_by_puts(open_store: OpenStore) -> None:
    gated = open_store(fits=4, on_disk=0)
    waiting = [hint_of(0, 1, group="s"), hint_of(2)]
    for number, group in ((0, "s"), (1, "s"), (2, ""), (3, "")):
        gated.store.put(make_entry(number, group=group, index=number))
    for each in waiting:
        gated.store.prefetcher.queued(each)
    for number in range(10, 30):
        gated.store.put(make_entry(number))
    assert gated.in_memory() == {0, 1, 2, 29}
    gated.store.prefetcher.started(waiting[0])
    for number in range(30, 40):
        gated.store.put(make_entry(number))
    assert {0, 1, 2} < gated.in_memory()  # until it has opened what it needs
    for each in waiting:
        gated.store.prefetcher.left(each)
    for number in range(40, 50):
        gated.store.put(make_entry(number))
    assert gated.in_memory().isdisjoint({0, 1, 2})


def lookahead(held: str, queued: str, policy: Policy | None = None) -> Policy:
    """The policy with a block of each group, and requests 0, 1, 2... of groups in a queue."""
    policy = policy or make_policy("lookahead")
    for group in held:
        policy.held(group, 1, 1, 0.0)
    for request, group in enumerate(queued):
        policy.queued(group, request)
    return policy


def test_lookahead_forgets_the_request_that_left_and_not_another_of_its_group() -> None:
    policy = lookahead("ab", "aba")
    policy.left("a", 0)  # the other request of a is behind b
    assert policy.victim((), 1.0) == Eviction("a", whole=True)
    policy.queued("b", 3)
    policy.left("a", 2)
    policy.left("a", 7)  # never joined: ignored
    policy.left("b", 3)
    assert policy.victim({"a"}, 1.0) == Eviction("b", whole=True)


def test_lookahead_keeps_the_position_of_a_group_whose_later_request_left() -> None:
    policy = lookahead("ab", "aba")
    policy.left("a", 2)  # a is still before b
    assert policy.victim((), 1.0) == Eviction("b", whole=True)


def test_lookahead_evicts_groups_behind_its_window() -> None:
    policy = lookahead("abc", "abc", WindowedLookAhead(1))
    policy.left("b", 1)
    policy.left("a", 0)  # c moves into the window
    assert policy.victim((), 1.0) == Eviction("b", whole=True)
    assert policy.victim({"a", "b"}, 1.0) == Eviction("c", whole=True)


def test_lookahead_counts_a_group_that_waits_twice_only_once() -> None:
    assert lookahead("abc", "aaabc", WindowedLookAhead(2)).victim((), 1.0) == Eviction(
        "c", whole=True
    )


class Asked(set[str]):
    """Pinned groups, and how often a policy asks whether one is among them."""

    asked = 0

    def __contains__(self, group: object) -> bool:
        self.asked += 1
        return super().__contains__(group)


@pytest.mark.parametrize("length", [10, 1000])
def test_lookahead_finds_its_victim_without_a_look_at_the_whole_queue(length: int) -> None:
    """All that is held waits, and of every group two requests."""
    policy = make_policy("lookahead")
    groups = [f"g{number}" for number in range(length)]
    for number, group in enumerate(groups):
        policy.queued(group, number)
        policy.queued(group, length + number)
        policy.held(group, 1, 1, 0.0)
    leased = Asked(groups[-2:])
    assert policy.victim(leased, 1.0) == Eviction(groups[-3], whole=True)
    assert leased.asked <= 4


@pytest.mark.parametrize("length", [10, 200])
def test_a_request_costs_the_prefetcher_a_look_at_each_of_its_entries(length: int) -> None:
    """However many wait before and behind it, and whoever comes and goes."""

    class Looked(WrappedTier):
        looks = 0

        def contains(self, key: EntryKey) -> bool:
            self.looks += 1
            return self.tier.contains(key)

    memory = Looked(MemoryTier(3 * SIZE, make_policy("lookahead")))
    files = MemoryTier(10**7, LRU())
    files.kind = TierKind.DISK
    with Store([memory, files], write_buffer_bytes=10**6) as store:
        hints = [hint_of(number, length + number) for number in range(length)]
        for number in range(2 * length):
            files.put(stored_form(make_entry(number)))
        for hint in hints:
            store.prefetcher.queued(hint)
        store.flush()
        for hint in hints:
            store.prefetcher.started(hint)
            store.prefetcher.left(hint)
            store.flush()
        # one for each entry, and one more each time that the next entry has no room yet
        assert memory.looks <= 2 * length + 4 * length
        assert store.stats().announced == 0


def test_many_threads_at_once_never_read_wrong_bytes_and_leave_no_pins(tmp_path: Path) -> None:
    """The tiers are small, so that fetches, promotions, evictions and deletions happen at the same
    time.
    """
    entries = [
        make_entry(number, group="s" if number < 4 else "", index=number % 4)
        for number in range(16)
    ]
    files = DiskTier(tmp_path, 10 * 1024, make_policy("lookahead"))
    memory = MemoryTier(5 * SIZE, make_policy("lookahead"))
    served = [0]

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(40):
            numbers = choose.sample(range(16), 3)
            hinted = [
                HintedEntry(IDENTITY, tuple(ids_of(n)), SIZE, "s" if n < 4 else "") for n in numbers
            ]
            waiting = PrefetchHint(tuple(hinted))
            store.prefetcher.queued(waiting)
            time.sleep(choose.random() / 500)
            if choose.random() < 0.7:
                store.prefetcher.started(waiting)
                for number in numbers:
                    lease = store.lease(IDENTITY, ids_of(number))
                    if lease is None:
                        store.put(entries[number])
                    else:
                        with lease:
                            assert same(read_all(lease), entries[number])
                        served[0] += 1
            store.prefetcher.left(waiting)
            if choose.random() < 0.1:
                store.delete(make_entry(numbers[0]).info.key)

    with Store([memory, files], write_buffer_bytes=10**6) as store:
        together([partial(work, seed) for seed in range(32)], timeout_s=120.0)
        store.flush()
        assert served[0] > 200
        assert store.stats().announced == 0
        for tier in (memory, files):
            assert tier.stats().used_bytes <= tier.stats().capacity_bytes
            assert tier.stats().damaged == 0
            assert open_leases(tier) == 0
