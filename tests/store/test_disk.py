"""The rules of the disk tier beyond the contract of all tiers: durability, recovery, locks and
damage.
"""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ragkv.errors import EntryDamagedError, EntryUnreachableError, StoreError, StoreLockedError
from ragkv.store.policies import LRU
from ragkv.store.store import Store
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import DiskTier, ReadOnlyDiskTier
from tests.faults import os_error, raising

from .entries import IDENTITY, ids_of, leased, make_entry, open_leases, read_all, same, served

FILE_BYTES = 1024  # an entry of these tests has a little less


def open_tier(place: Path, capacity: int = 100, **options: object) -> DiskTier:
    return DiskTier(place, capacity * FILE_BYTES, LRU(), **options)  # type: ignore[arg-type]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with closing(open_tier(tmp_path)) as opened:
        yield opened


def fill(place: Path, *numbers: int) -> None:
    tier = open_tier(place)
    for number in numbers:
        assert tier.put(stored_form(make_entry(number)))
    tier.close()


def file_of(place: Path, number: int, tokens: int = 4) -> Path:
    key = make_entry(number, tokens=tokens).info.key
    return place / "entries" / key.digest[:2] / f"{key.to_text()}.kv"


def held(tier: DiskTier, numbers: range = range(20)) -> set[int]:
    return {number for number in numbers if tier.contains(make_entry(number).info.key)}


def test_only_the_owner_can_access_the_directory(tmp_path: Path) -> None:
    place = tmp_path / "new" / "store"
    fill(place, 1)
    for path in [place, *place.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    with closing(open_tier(tmp_path)) as tier:
        served(tier, make_entry(1))
    with closing(open_tier(tmp_path, capacity=3)) as tier:
        tier.put(stored_form(make_entry(4)))
        assert held(tier) == {1, 3, 4}


def test_a_smaller_capacity_applies_from_the_next_opening(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3, 4)
    with closing(open_tier(tmp_path, capacity=2)) as tier:
        assert held(tier) == {3, 4}
        sizes = [path.stat().st_size for path in tmp_path.glob("entries/*/*")]
        assert sum(sizes) == tier.stats().used_bytes <= 2 * FILE_BYTES


def test_a_file_that_was_damaged_while_no_process_had_the_store_is_found_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, 1, 2)
    file_of(tmp_path, 2).write_bytes(file_of(tmp_path, 2).read_bytes()[:-1])
    with closing(open_tier(tmp_path)) as tier:
        assert [info.key for info in tier.infos()] == [make_entry(1).info.key]
        assert served(tier, make_entry(1)) and not served(tier, make_entry(2))
        assert tier.stats().damaged == 1
    assert not file_of(tmp_path, 2).exists()
    assert str(make_entry(2).info.key) in caplog.text


def test_a_conversations_blocks_are_known_as_such_after_a_restart(tmp_path: Path) -> None:
    """Without reading a file: their names say it. So a policy evicts the tail first."""
    blocks = [make_entry(number, group="talk", index=number) for number in range(3)]
    with closing(open_tier(tmp_path)) as tier:
        assert all(tier.put(stored_form(block)) for block in (blocks[1], blocks[2], blocks[0]))
        assert tier.put(stored_form(make_entry(9)))
    for path in tmp_path.glob("entries/*/*"):
        path.write_bytes(b"x" * FILE_BYTES)
        os.utime(path, (path.stat().st_atime, 0))
    with closing(open_tier(tmp_path, capacity=4)) as tier:
        assert {slot.item.key for slot in tier.ledger.slots() if slot.item.group} == {
            block.info.key for block in blocks
        }
        assert tier.delete(make_entry(9).info.key)
        assert tier.put(stored_form(make_entry(10))) and tier.put(stored_form(make_entry(11)))
        assert tier.contains(blocks[0].info.key) and not tier.contains(blocks[2].info.key)


def test_a_second_file_of_an_entry_is_removed(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    file = file_of(tmp_path, 1)
    second = file.with_name(f"{file.stem}.talk.0.kv")
    second.write_bytes(file.read_bytes())
    with closing(open_tier(tmp_path)) as tier:
        assert held(tier) == {1} and served(tier, make_entry(1))
        assert tier.stats().entries == 1
    assert file.exists() != second.exists()


def test_a_reader_finds_a_block_next_to_its_writer(tier: DiskTier, tmp_path: Path) -> None:
    block = make_entry(1, group="talk", index=3)
    tier.put(stored_form(block))
    reader = ReadOnlyDiskTier(tmp_path)
    assert reader.contains(block.info.key) and served(reader, block)


def test_temporary_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "tmp" / "123-1.tmp").write_bytes(b"half an entry")
    open_tier(tmp_path).close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_foreign_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    for name in ("notes.txt", "entries/readme", "entries/ab"):
        (tmp_path / name).write_text("mine")
    open_tier(tmp_path).close()
    assert (tmp_path / "entries" / "readme").read_text() == "mine"


def test_an_entry_is_visible_only_after_its_bytes_are_durable(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_entry(1).info.key
    steps = list[str]()
    fsync = os.fsync
    replace = Path.replace

    def spy_fsync(fd: int) -> None:
        target = Path(f"/proc/self/fd/{fd}").readlink()
        steps.append("sync " + ("file" if target.suffix == ".tmp" else target.name))
        assert tier.contains(key) is False
        fsync(fd)

    def spy_replace(source: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    tier.put(stored_form(make_entry(1)))
    assert steps == ["sync entries", "sync file", "rename", f"sync {key.digest[:2]}"]
    monkeypatch.undo()


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_a_write_to_a_full_disk_fails_cleanly_and_is_logged_once(
    tier: DiskTier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    tier.put(stored_form(make_entry(1)))
    monkeypatch.setattr(os, call, raising(os_error(errno.ENOSPC)))
    assert not tier.put(stored_form(make_entry(2)))
    assert not tier.put(stored_form(make_entry(3)))
    monkeypatch.undo()
    assert caplog.text.count("No space left") == 1
    assert list((tmp_path / "tmp").iterdir()) == []
    assert held(tier) == {1}
    assert served(tier, make_entry(1))
    assert tier.put(stored_form(make_entry(2)))
    assert served(tier, make_entry(2))


def test_a_short_write_is_continued(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:1000])))
    assert tier.put(stored_form(make_entry(1)))
    monkeypatch.undo()
    assert served(tier, make_entry(1))


def test_a_second_writer_is_refused_naming_the_first(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(StoreLockedError, match=r"this very process .*read_only=True"):
        open_tier(tmp_path)
    tier.close()
    open_tier(tmp_path).close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(StoreError, match="Cannot write"):
        open_tier(tmp_path / "file")
    monkeypatch.setattr(Path, "mkdir", raising(os_error(code)))
    with pytest.raises(StoreError, match=r"Cannot write to .*(Read-only|denied).*read_only=True"):
        open_tier(tmp_path / "store")


def test_a_read_only_tier_refuses_a_directory_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store to read"):
        ReadOnlyDiskTier(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_read_only_tier_writes_nothing_and_treats_vanished_files_as_misses(
    tier: DiskTier, tmp_path: Path
) -> None:
    tier.put(stored_form(make_entry(1)))
    tier.put(stored_form(make_entry(2)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("entries/**/*")}
    reader = ReadOnlyDiskTier(tmp_path)
    assert served(reader, make_entry(1))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("entries/**/*")} == before
    with leased(reader, make_entry(1)) as lease:
        tier.delete(make_entry(1).info.key)
        assert same(read_all(lease), make_entry(1))
    assert not served(reader, make_entry(1))
    assert [info.key for info in reader.infos()] == [make_entry(2).info.key]
    reader.close()


def test_a_read_only_tier_treats_damage_as_a_miss_and_leaves_the_file_to_the_writer(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 1)
    file_of(tmp_path, 1).write_bytes(b"rubbish")
    reader = ReadOnlyDiskTier(tmp_path)
    assert not served(reader, make_entry(1))
    assert reader.stats().damaged == 1
    assert file_of(tmp_path, 1).exists()


def test_an_entry_with_a_damaged_layer_is_dropped_and_can_be_put_again(
    tier: DiskTier, tmp_path: Path
) -> None:
    tier.put(stored_form(make_entry(1)))
    with file_of(tmp_path, 1).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with leased(tier, make_entry(1)) as lease:
        assert torch.equal(lease.read_layer(0), make_entry(1).kv[0])
        with pytest.raises(EntryDamagedError, match="layer 1"):
            lease.read_layer(1)
        assert not tier.contains(make_entry(1).info.key)
        assert tier.put(stored_form(make_entry(1)))  # while the lease of the damaged one is open
    assert served(tier, make_entry(1))


def test_too_many_open_files_cause_a_miss_and_no_damage(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(stored_form(make_entry(1)))
    monkeypatch.setattr(os, "open", raising(os_error(errno.EMFILE)))
    assert not served(tier, make_entry(1))
    monkeypatch.undo()
    assert served(tier, make_entry(1))
    assert tier.stats().damaged == 0


def test_a_lease_may_be_closed_while_another_thread_reads(tier: DiskTier) -> None:
    """The reader's descriptor must not be closed, because its number could become another
    file's.
    """
    for number in range(8):
        tier.put(stored_form(make_entry(number)))

    def read(number: int) -> None:
        lease = tier.lease(IDENTITY, ids_of(number))
        assert lease is not None
        closer = threading.Thread(target=lease.close)
        try:
            for turn in range(20):
                if turn == 3:
                    closer.start()
                assert torch.equal(lease.read_layer(turn % 2), make_entry(number).kv[turn % 2])
        except StoreError as error:
            assert "closed" in str(error)
        closer.join()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, list(range(8)) * 10))
    assert tier.stats().damaged == 0


def test_an_abandoned_lease_unpins_its_entry(tmp_path: Path) -> None:
    with closing(open_tier(tmp_path, capacity=1)) as tier:
        tier.put(stored_form(make_entry(1)))
        lease = tier.lease(IDENTITY, ids_of(1))
        assert not tier.put(stored_form(make_entry(2)))
        del lease
        assert tier.put(stored_form(make_entry(2)))


def test_a_lease_stays_readable_after_its_tier_is_closed(tier: DiskTier) -> None:
    tier.put(stored_form(make_entry(1)))
    with leased(tier, make_entry(1)) as lease:
        tier.close()
        assert same(read_all(lease), make_entry(1))
    assert tier.lease(IDENTITY, ids_of(1)) is None
    assert not tier.put(stored_form(make_entry(2)))


def test_a_deletion_that_the_disk_refuses_raises_and_the_entry_stays(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(stored_form(make_entry(1)))
    monkeypatch.setattr(Path, "unlink", raising(os_error(errno.EROFS)))
    with pytest.raises(StoreError, match="could not be deleted"):
        tier.delete(make_entry(1).info.key)
    monkeypatch.undo()
    assert tier.contains(make_entry(1).info.key)


def test_entries_of_other_format_versions_are_misses_take_space_and_are_removed_by_gc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ragkv.store.record.RECORD_VERSION", 1)
        fill(tmp_path, 1)
    old_bytes = file_of(tmp_path, 1).stat().st_size
    with Store([open_tier(tmp_path)], write_buffer_bytes=0) as store:
        store.durable.put(make_entry(2))
        assert store.stats().tiers[0].used_bytes > old_bytes
        assert [info.key for info in store.contents.infos()] == [make_entry(2).info.key]
        assert store.contents.gc(lambda _: True) == old_bytes
        assert store.stats().tiers[0].entries == 1 and served(store, make_entry(2))


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE, errno.EIO])
def test_a_read_that_fails_drops_the_entry_only_if_the_disk_cannot_give_its_bytes(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    stays = code != errno.EIO
    tier.put(stored_form(make_entry(1)))
    with leased(tier, make_entry(1)) as lease, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", raising(os_error(code)))
        with pytest.raises(EntryUnreachableError if stays else EntryDamagedError):
            lease.read_layer(0)
    assert (file_of(tmp_path, 1).exists(), tier.stats().damaged) == (stays, not stays)
    assert served(tier, make_entry(1)) == stays and open_leases(tier) == 0


def test_collecting_garbage_leaves_an_entry_that_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1)
    with closing(Store([open_tier(tmp_path)], write_buffer_bytes=0)) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", raising(os_error(errno.EMFILE)))
            assert store.contents.gc(lambda _: True) == 0
        assert store.contains(make_entry(1).info.key) and file_of(tmp_path, 1).exists()


def test_a_lookup_that_fails_in_any_way_pins_nothing(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(stored_form(make_entry(1)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", raising(MemoryError()))
        with pytest.raises(MemoryError):
            tier.lease(IDENTITY, ids_of(1))
    assert open_leases(tier) == 0 and tier.stats().misses == 1


def test_look_ups_go_on_while_the_disk_confirms_a_deletion(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        assert tier.put(stored_form(make_entry(number)))
    syncing = threading.Event()
    go_on = threading.Event()

    def slow(_: Path) -> None:
        syncing.set()
        assert go_on.wait(60)

    monkeypatch.setattr("ragkv.store.tiers.entry_files.sync", slow)
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(tier.delete, make_entry(1).info.key)
        assert syncing.wait(60)
        try:
            assert tier.contains(make_entry(2).info.key)
            assert not tier.contains(make_entry(1).info.key)
            assert not deleting.done()
        finally:
            go_on.set()
        assert deleting.result(60)


def test_a_deletion_that_the_disk_does_not_confirm_is_told_until_it_does(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tier.put(stored_form(make_entry(1)))
    key = make_entry(1).info.key
    with monkeypatch.context() as patch:
        patch.setattr(
            "ragkv.store.tiers.entry_files.sync", raising(OSError(errno.EIO, "an I/O error"))
        )
        for _ in range(2):
            with pytest.raises(StoreError, match="did not confirm"):
                tier.delete(key)
    assert not tier.delete(key)  # it is gone, and now the disk has confirmed it
