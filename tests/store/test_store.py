"""The rules of the stack of tiers: hits are promoted, puts are demoted, deletions reach every tier,
no put waits.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ragkv.config import StoreConfig
from ragkv.errors import StoreError, StoreReadOnlyError
from ragkv.store.contents import deleted_everywhere
from ragkv.store.entry import Entry, EntryKey
from ragkv.store.opening import open_store
from ragkv.store.policies import LRU
from ragkv.store.store import Store
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import DiskTier, Lease, MemoryTier, Tier, TierKind
from ragkv.store.tiers.read_only import ReadOnlyDiskTier
from tests.store.fakes import HeldWrites, WrappedTier, memory_below

from . import entries
from .entries import IDENTITY, ids_of, leased, make_entry, read_all, same

ENTRY_BYTES = make_entry().size_bytes


def config(directory: Path | None, **changes: object) -> StoreConfig:
    place = None if directory is None else str(directory)
    settings = {"memory_bytes": 100 * ENTRY_BYTES, "disk_bytes": 10**7, **changes}
    return StoreConfig(directory=place, **settings)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(config(tmp_path)) as opened:
        yield opened


def served(store: Store, number: int) -> bool:
    """Whether a request is served the entry; returns after the promotion that closing the lease
    starts.
    """
    found = entries.served(store, make_entry(number))
    store.flush()
    return found


def kind_of_hit(store: Store, number: int) -> str | None:
    with leased(store, make_entry(number)) as lease:
        return lease.kind


def test_a_put_is_served_at_once_and_reaches_the_disk(store: Store, tmp_path: Path) -> None:
    store.put(make_entry(1))
    assert kind_of_hit(store, 1) == TierKind.MEMORY
    store.flush()
    memory, disk = store.stats().tiers
    assert (memory.entries, disk.entries) == (1, 1)
    assert len(list(tmp_path.glob("entries/*/*.kv"))) == 1


def test_what_was_stored_before_a_memory_rule_follows_it(store: Store) -> None:
    store.put(make_entry(1))
    store.flush()
    store.limits.limit_memory(lambda *_: True)
    assert kind_of_hit(store, 1) == TierKind.MEMORY
    store.limits.limit_memory(lambda *_: False)
    assert kind_of_hit(store, 1) == TierKind.DISK


def test_an_entry_that_no_tier_below_has_stays_in_memory() -> None:
    with open_store(config(None)) as store:
        store.put(make_entry(1))
        store.limits.limit_memory(lambda *_: False)
        assert kind_of_hit(store, 1) == TierKind.MEMORY


def test_every_entry_reaches_the_disk_even_if_memory_is_small(tmp_path: Path) -> None:
    with open_store(config(tmp_path, memory_bytes=2 * ENTRY_BYTES)) as store:
        for number in range(20):
            store.put(make_entry(number))
        store.flush()
        assert store.stats().tiers[1].entries == 20
        assert store.stats().dropped_writes == 0
        assert all(served(store, number) for number in range(20))


def test_a_put_does_not_wait_for_the_disk_and_a_full_write_buffer_drops_and_counts(
    tmp_path: Path,
) -> None:
    disk = HeldWrites(DiskTier(tmp_path, 10**7, LRU()))
    with Store([disk], write_buffer_bytes=3 * ENTRY_BYTES) as store:
        for number in range(5):
            store.put(make_entry(number))
        stats = store.stats()
        assert (stats.pending_bytes, stats.dropped_writes) == (3 * ENTRY_BYTES, 2)
        disk.go.set()
        store.flush()
        assert store.stats().pending_bytes == 0
        assert {number for number in range(5) if served(store, number)} == {0, 1, 2}


def test_an_entry_that_waits_to_be_written_is_served(tmp_path: Path) -> None:
    disk = HeldWrites(DiskTier(tmp_path, 10**7, LRU()))
    with Store([disk], write_buffer_bytes=10**6) as store:
        store.put(make_entry(1))
        with leased(store, make_entry(1)) as lease:
            assert same(read_all(lease), make_entry(1))
        assert store.contains(make_entry(1).info.key)
        assert not disk.contains(make_entry(1).info.key)
        disk.go.set()
        store.flush()
        assert disk.contains(make_entry(1).info.key)


@pytest.mark.parametrize("being_written", [True, False])
def test_a_deletion_reaches_every_tier_and_the_write_buffer(
    tmp_path: Path, being_written: bool
) -> None:
    disk = HeldWrites(DiskTier(tmp_path, 10**7, LRU()))
    with Store([MemoryTier(10**6, LRU()), disk], write_buffer_bytes=10**6) as store:
        store.put(make_entry(0))
        store.put(make_entry(1))
        assert disk.waiting.wait(20)  # entry 0; entry 1 waits
        threading.Timer(0.05, disk.go.set).start()
        number = 0 if being_written else 1
        assert store.delete(make_entry(number).info.key)
        store.flush()
        assert not served(store, number)
        assert not store.contains(make_entry(number).info.key)
        assert len(list(tmp_path.glob("entries/*/*.kv"))) == 1
        assert not store.delete(make_entry(number).info.key)


def test_a_tier_that_cannot_delete_keeps_no_other_tier_and_no_other_key_from_it() -> None:
    class Refusing(WrappedTier):
        kind = "refusing"

        def delete(self, key: EntryKey) -> bool:
            raise StoreError(f"{key} is on a disk that failed")

    lower = memory_below()
    keys = [make_entry(number).info.key for number in range(2)]
    with Store(
        [MemoryTier(10**6, LRU()), Refusing(lower), lower], write_buffer_bytes=10**6
    ) as store:
        for number in range(2):
            store.durable.put(make_entry(number))
        with pytest.raises(StoreError, match="on a disk that failed"):
            deleted_everywhere(keys, store.delete)
        assert [lower.contains(key) for key in keys] == [False, False]


def test_an_entry_is_not_copied_up_after_a_deletion_that_failed_in_another_tier() -> None:
    class Refusing(WrappedTier):
        def delete(self, key: EntryKey) -> bool:
            raise StoreError(f"{key} is on a server that is away")

    fastest, lower = MemoryTier(10**6, LRU()), memory_below()
    entry = make_entry(1)
    lower.put(stored_form(entry))
    other = Refusing(memory_below("other"))
    with Store([fastest, lower, other], write_buffer_bytes=10**6) as store:
        lease = leased(store, entry)
        with pytest.raises(StoreError):
            store.delete(entry.info.key)
        lease.close()
        store.flush()
        assert not fastest.contains(entry.info.key)


def test_a_lease_closed_after_a_deletion_does_not_bring_the_entry_back(tmp_path: Path) -> None:
    with open_store(config(tmp_path)) as store:
        store.durable.put(make_entry(1))
    with open_store(config(tmp_path)) as store:
        lease = leased(store, make_entry(1))
        store.delete(make_entry(1).info.key)
        lease.close()
        store.flush()
        assert not served(store, 1)
        assert list(store.contents.infos()) == []


def test_a_hit_is_copied_up_unless_more_was_deleted_since_than_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.store.copying.REMEMBERED", 2)
    with open_store(config(tmp_path)) as store:
        store.durable.put(make_entry(1))
    for deletions, copied in ((2, 1), (3, 0)):
        with open_store(config(tmp_path)) as store:
            with leased(store, make_entry(1)):
                for number in range(deletions):  # of other entries
                    store.delete(make_entry(10 + number).info.key)
            store.flush()
            assert store.stats().tiers[0].entries == copied


def test_an_entry_deleted_during_its_lookup_is_not_promoted(tmp_path: Path) -> None:
    class DeletingTier(WrappedTier):
        def wrap(self, lease: Lease) -> Lease:
            store.delete(lease.info.key)
            return lease

    disk = DiskTier(tmp_path, 10**6, LRU())
    disk.put(stored_form(make_entry(1)))
    with Store([MemoryTier(10**6, LRU()), DeletingTier(disk)], write_buffer_bytes=10**6) as store:
        leased(store, make_entry(1)).close()
        store.flush()
        assert not store.contains(make_entry(1).info.key)


def test_without_memory_a_hit_is_copied_to_a_disk_that_may_be_written_and_to_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Server(WrappedTier):
        kind = TierKind.REDIS

    for read_only in (False, True):
        disk: Tier = DiskTier(tmp_path, 10**6, LRU())
        if read_only:
            disk.close()
            disk = ReadOnlyDiskTier(tmp_path)
        server = MemoryTier(10**6, LRU())
        number = 1 + read_only
        server.put(stored_form(make_entry(number)))
        with Store([disk, Server(server)], write_buffer_bytes=10**6) as store:
            leased(store, make_entry(number)).close()
            store.flush()
            assert disk.contains(make_entry(number).info.key) != read_only
    assert caplog.text == ""


def test_a_deletion_that_a_server_keeps_waiting_holds_up_no_other_copy_or_deletion() -> None:
    class Slow(WrappedTier):
        waiting = threading.Event()
        go_on = threading.Event()

        def delete(self, key: EntryKey) -> bool:
            if key == make_entry(0).info.key:
                self.waiting.set()
                assert self.go_on.wait(60)
            return self.tier.delete(key)

    fastest, lower = MemoryTier(10**6, LRU()), memory_below()
    server = Slow(memory_below("server"))
    for number in range(3):
        lower.put(stored_form(make_entry(number)))
    with (
        Store([fastest, lower, server], write_buffer_bytes=10**6) as store,
        ThreadPoolExecutor() as pool,
    ):
        deleting = pool.submit(store.delete, make_entry(0).info.key)
        try:
            assert server.waiting.wait(60)
            assert pool.submit(store.delete, make_entry(1).info.key).result(60)
            leased(store, make_entry(2)).close()
            pool.submit(store.flush).result(60)
            assert fastest.contains(make_entry(2).info.key)
            assert not deleting.done()
        finally:
            server.go_on.set()
        assert deleting.result(60)


def test_an_entry_found_while_it_is_being_deleted_is_not_copied_up() -> None:
    class Finding(WrappedTier):
        def delete(self, key: EntryKey) -> bool:
            leased(store, make_entry(1)).close()  # memory has deleted it, this tier has not
            store._copies.flush()
            return self.tier.delete(key)

    lower = Finding(memory_below())
    lower.put(stored_form(make_entry(1)))
    with Store([MemoryTier(10**6, LRU()), lower], write_buffer_bytes=10**6) as store:
        assert store.delete(make_entry(1).info.key)
        store.flush()
        assert not store.contains(make_entry(1).info.key)


def test_an_entry_deleted_while_it_is_copied_to_a_tier_that_lacks_it_does_not_come_back() -> None:
    class DeletedMeanwhile(WrappedTier):
        def put(self, entry: Entry) -> bool:
            store.delete(entry.info.key)
            return self.tier.put(entry)

    upper, lower = memory_below("upper"), DeletedMeanwhile(memory_below("lower"))
    upper.put(stored_form(make_entry(1)))
    with Store([MemoryTier(10**6, LRU()), upper, lower], write_buffer_bytes=10**6) as store:
        assert not store.durable.ensure(IDENTITY, ids_of(1))
        assert not store.contains(make_entry(1).info.key)


def test_a_read_only_store_reads_next_to_its_writer_and_refuses_to_write(
    store: Store, tmp_path: Path
) -> None:
    store.durable.put(make_entry(1))
    with open_store(config(tmp_path, read_only=True)) as reader:
        store.durable.put(make_entry(2))
        assert all(served(reader, number) for number in (1, 2))
        reader.put(make_entry(3))  # stored in the reader's own memory
        assert served(reader, 3)
        assert not store.contains(make_entry(3).info.key)
        for write in (
            lambda: reader.durable.put(make_entry(4)),
            lambda: reader.delete(make_entry(1).info.key),
        ):
            with pytest.raises(StoreReadOnlyError, match="reading only"):
                write()
        store.delete(make_entry(1).info.key)
        store.delete(make_entry(2).info.key)
    with open_store(config(tmp_path, read_only=True)) as reader:
        assert not served(reader, 1)


class Broken(MemoryTier):
    """A tier whose lookups and puts fail."""

    def lease(self, *_: object) -> Lease | None:
        raise OSError("no")

    def put(self, *_: object) -> bool:
        raise RuntimeError("no")


def test_a_failing_tier_is_a_miss_and_fails_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(
        [Broken(10**6, LRU()), DiskTier(tmp_path, 10**6, LRU())], write_buffer_bytes=10**6
    ) as store:
        store.put(make_entry(1))
        store.flush()
        assert served(store, 1)
    assert "could not look up an entry" in caplog.text


def test_a_write_that_raises_is_counted_as_dropped() -> None:
    tiers = [MemoryTier(10**6, LRU()), Broken(10**6, LRU())]
    tiers[1].kind = "broken"
    with Store(tiers, write_buffer_bytes=10**6) as store:
        store.put(make_entry(1))
        store.flush()
        assert store.stats().dropped_writes == 1


def test_closing_twice_is_harmless_and_writes_waiting_entries(tmp_path: Path) -> None:
    store = open_store(config(tmp_path))
    for number in range(5):
        store.put(make_entry(number))
    store.close()
    store.close()
    store.put(make_entry(9))  # a put after closing is not an error
    with open_store(config(tmp_path)) as again:
        assert again.stats().tiers[1].entries == 5


def test_a_store_that_is_dropped_writes_what_waits_is_closed_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = HeldWrites(DiskTier(tmp_path, 10**7, LRU()))
    store = Store([disk], write_buffer_bytes=10**6)
    store.put(make_entry(1))
    del store  # it does not wait for the disk: any thread may collect garbage
    disk.go.set()
    (closing,) = (one for one in threading.enumerate() if one.name == "ragkv-closer")
    closing.join(60)
    assert "dropped without being closed" in caplog.text
    with open_store(config(tmp_path)) as again:
        assert again.stats().tiers[1].entries == 1


def test_a_store_that_is_open_when_the_process_ends_writes_what_waits(tmp_path: Path) -> None:
    code = (
        "from ragkv.config import StoreConfig\n"
        "from ragkv.store.opening import open_store\n"
        "from tests.store.entries import make_entry\n"
        f"store = open_store(StoreConfig(directory={str(tmp_path)!r}))\n"
        "for number in range(20): store.put(make_entry(number))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with open_store(config(tmp_path)) as again:
        assert again.stats().tiers[1].entries == 20


def test_a_store_has_one_tier_of_a_kind() -> None:
    tiers = [MemoryTier(10**6, LRU()), MemoryTier(10**6, LRU())]
    with pytest.raises(ValueError, match="memory, memory"):
        Store(tiers, write_buffer_bytes=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_entries_are_page_locked_for_cuda_and_counted_as_allocated(tmp_path: Path) -> None:
    entry = make_entry(1)
    on_device = Entry(entry.info, entry.kv.cuda())
    with open_store(config(tmp_path), page_locked=True) as store:
        store.put(on_device)
        with leased(store, make_entry(1)) as lease:
            assert lease.read_layer(0).is_pinned()
            assert same(read_all(lease), entry)
        assert store.stats().tiers[0].used_bytes >= entry.size_bytes
