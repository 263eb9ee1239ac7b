"""A file system that is really full: writes fail cleanly, entries stay readable, deletions let
writes succeed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.store.opening import open_store
from tests.small_disk import fill, small_disk
from tests.store.entries import make_entry, served

from .writing import config_of


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    with small_disk(tmp_path / "small", "1m") as place:
        yield place


def test_a_full_disk_loses_no_entry_and_recovers_after_deletions(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # 80 KiB each: 40 do not fit
    entries = [make_entry(number, tokens=1000) for number in range(40)]
    with open_store(config_of(small)) as store:
        stored = [entry for entry in entries if store.durable.put(entry)]
        assert 5 < len(stored) < 40
        assert caplog.text.count("No space left") == 1
        assert not list(small.glob("tmp/*"))
        assert all(served(store, entry) for entry in stored)
        for entry in entries:  # in the background: counted, never an error
            store.put(entry)
        store.flush()
        assert store.stats().dropped_writes == 40 - len(stored)
        refused = next(entry for entry in entries if entry not in stored)
        store.delete(stored[0].info.key)
        store.delete(stored[1].info.key)
        assert store.durable.put(refused)
        assert served(store, refused)
    with open_store(config_of(small)) as store:
        assert all(served(store, entry) for entry in [refused, *stored[2:]])


def test_a_store_on_a_full_disk_opens_serves_and_deletes(small: Path) -> None:
    with open_store(config_of(small)) as store:
        assert store.durable.put(make_entry(1))
    fill(small)
    with open_store(config_of(small)) as store:
        assert served(store, make_entry(1))
        assert not store.durable.put(make_entry(2, tokens=1000))
        assert store.delete(make_entry(1).info.key)
