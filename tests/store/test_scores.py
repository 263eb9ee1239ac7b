"""Scores in a store: replaced by another network's, deleted with their entry, and moved out of older directories."""

import dataclasses
from pathlib import Path

import pytest
import torch

from ragkv.config import StoreConfig
from ragkv.store import LRU, DiskTier, Entry, ReadOnlyDiskTier, Store
from ragkv.store.directory import EntryDirectory
from ragkv.store.record import Record
from ragkv.store.tiers.disk_upgrade import MARKER

from .entries import IDENTITY, as_stored, ids_of, leased, make_entry, read_all, same


def scores_of(number: int, network: str, value: float) -> Entry:
    return Entry.of_scores(make_entry(number).info, network, torch.full((4, 3), value).half())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(StoreConfig(directory=str(tmp_path / "store")))


def values(store: Store, number: int, network: str) -> list[float] | None:
    found = store.scores(scores_of(number, network, 0.0).info.identity, ids_of(number))
    return None if found is None else found[:, 0].tolist()


class TestPut:
    def test_scores_replace_those_of_another_network_in_their_slot(self, store: Store) -> None:
        with store:
            store.put_durably(make_entry(1))
            store.put_scores(scores_of(1, "a-one", 1.0), durably=True)
            store.put_scores(scores_of(1, "b-two", 2.0), durably=True)
            store.put_scores(scores_of(1, "a-three", 3.0))
            store.flush()
            assert values(store, 1, "a-one") is None
            assert values(store, 1, "b-two") == [2.0] * 4
            assert values(store, 1, "a-three") == [3.0] * 4

    def test_scores_of_a_deleted_entry_are_not_kept(self, store: Store, tmp_path: Path) -> None:
        with store:
            store.put_scores(scores_of(1, "a-one", 1.0), durably=True)
            assert values(store, 1, "a-one") is None
        assert not list(tmp_path.glob("store/entries/*/*"))

    def test_scores_that_wait_to_be_written_go_with_their_entry(self, store: Store, tmp_path: Path) -> None:
        with store:
            store.put(make_entry(1))
            store.put_scores(scores_of(1, "a-one", 1.0))
            store.delete(make_entry(1).info.key)
            store.flush()
            assert values(store, 1, "a-one") is None
        assert not list(tmp_path.glob("store/entries/*/*"))

    def test_scores_survive_a_restart(self, store: Store, tmp_path: Path) -> None:
        with store:
            store.put_durably(make_entry(1))
            store.put_scores(scores_of(1, "b-one", 1.0), durably=True)
        with Store.open(StoreConfig(directory=str(tmp_path / "store"), memory_bytes=0)) as again:
            assert values(again, 1, "b-one") == [1.0] * 4


class TestUpgrade:
    """A directory as earlier versions wrote it: scores in the entry, their network in its identity."""

    NETWORK = "5" * 32

    def old_directory(self, root: Path) -> None:
        directory = EntryDirectory(root)
        directory.open_for_writing()
        for number, network in ((1, self.NETWORK), (2, ""), (3, self.NETWORK)):
            entry = make_entry(number, scored=number != 3)
            identity = dataclasses.replace(IDENTITY, scorer=network)
            info = dataclasses.replace(
                entry.info, identity=identity, key=f"{number}" * 64 if network else entry.info.key
            )
            directory.write(info.key, Record.of(dataclasses.replace(entry, info=info)).pieces())
        directory.release()

    def test_kv_and_scores_of_an_older_directory_are_found_where_they_belong(self, tmp_path: Path) -> None:
        self.old_directory(tmp_path)
        tier = DiskTier(tmp_path, 10**6, LRU())
        for number in (1, 2, 3):
            with leased(tier, make_entry(number)) as lease:
                assert torch.equal(read_all(lease).kv, as_stored(make_entry(number)).kv)
        for number, network in ((1, self.NETWORK), (2, "variance")):
            with leased(tier, scores_of(number, f"a-{network}", 0.0)) as lease:
                assert lease.sensitivity is not None
                assert torch.equal(lease.sensitivity, make_entry(number).sensitivity)  # type: ignore[arg-type]
        assert tier.stats().entries == 3
        tier.close()

    def test_it_is_upgraded_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.old_directory(tmp_path)
        for _ in range(2):
            DiskTier(tmp_path, 10**6, LRU()).close()
        assert caplog.text.count("Upgrading 3 entries") == 1
        assert (tmp_path / MARKER).exists()

    def test_a_reader_says_that_it_must_be_upgraded(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.old_directory(tmp_path)
        ReadOnlyDiskTier(tmp_path).close()
        assert "Open the directory once for writing" in caplog.text

    def test_a_new_directory_needs_none(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tier = DiskTier(tmp_path, 10**6, LRU())
        tier.put(make_entry(1))
        tier.close()
        again = DiskTier(tmp_path, 10**6, LRU())
        with leased(again, make_entry(1)) as lease:
            assert same(read_all(lease), as_stored(make_entry(1)))
        again.close()
        assert not caplog.text
