"""Scores in a store: replaced by another network's, and deleted with their entry."""

from pathlib import Path

import pytest
import torch

from ragkv.config import StoreConfig
from ragkv.store import Entry, Store

from .entries import ids_of, make_entry


def scores_of(number: int, network: str, value: float) -> Entry:
    return Entry.of_scores(make_entry(number).info, network, torch.full((4, 3), value).half())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(StoreConfig(directory=str(tmp_path / "store")))


def values(store: Store, number: int, network: str) -> list[float] | None:
    found = store.scores(scores_of(number, network, 0.0).info.identity, ids_of(number))
    return None if found is None else found[:, 0].tolist()


class TestPut:
    def test_scores_replace_those_of_another_network_and_survive_a_restart(
        self, store: Store, tmp_path: Path
    ) -> None:
        with store:
            store.put_durably(make_entry(1))
            store.put_scores(scores_of(1, "a-one", 1.0), durably=True)
            store.put_scores(scores_of(1, "a-three", 3.0))
            store.flush()
            assert values(store, 1, "a-one") is None
            assert values(store, 1, "a-three") == [3.0] * 4
        with Store.open(StoreConfig(directory=str(tmp_path / "store"), memory_bytes=0)) as again:
            assert values(again, 1, "a-three") == [3.0] * 4

    def test_scores_of_a_deleted_entry_are_not_kept(self, store: Store, tmp_path: Path) -> None:
        with store:
            store.put_scores(scores_of(1, "a-one", 1.0), durably=True)
            assert values(store, 1, "a-one") is None
        assert not list(tmp_path.glob("store/entries/*/*"))

    def test_scores_that_wait_to_be_written_go_with_their_entry(
        self, store: Store, tmp_path: Path
    ) -> None:
        with store:
            store.put(make_entry(1))
            store.put_scores(scores_of(1, "a-one", 1.0))
            store.delete(make_entry(1).info.key)
            store.flush()
            assert values(store, 1, "a-one") is None
        assert not list(tmp_path.glob("store/entries/*/*"))
