"""A file system that is really full: writes fail cleanly, entries stay readable, deletions let
writes succeed.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv.store import Store
from tests.store.entries import make_entry, served

from .writing import config_of


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "ragkv-test", str(place)],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_loses_no_entry_and_recovers_after_deletions(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # 80 KiB each: 40 do not fit
    entries = [make_entry(number, tokens=1000) for number in range(40)]
    with Store.open(config_of(small_disk)) as store:
        stored = [entry for entry in entries if store.put_durably(entry)]
        assert 5 < len(stored) < 40
        assert caplog.text.count("No space left") == 1
        assert not list(small_disk.glob("tmp/*"))
        assert all(served(store, entry) for entry in stored)
        for entry in entries:  # in the background: counted, never an error
            store.put(entry)
        store.flush()
        assert store.stats().dropped_writes == 40 - len(stored)
        refused = next(entry for entry in entries if entry not in stored)
        store.delete(stored[0].info.key)
        store.delete(stored[1].info.key)
        assert store.put_durably(refused)
        assert served(store, refused)
    with Store.open(config_of(small_disk)) as store:
        assert all(served(store, entry) for entry in [refused, *stored[2:]])


def test_a_store_on_a_full_disk_opens_serves_and_deletes(small_disk: Path) -> None:
    with Store.open(config_of(small_disk)) as store:
        assert store.put_durably(make_entry(1))
    with (
        (small_disk / "ballast").open("wb", buffering=0) as ballast,
        pytest.raises(OSError, match="No space left"),
    ):
        while True:
            ballast.write(bytes(4096))
    with Store.open(config_of(small_disk)) as store:
        assert served(store, make_entry(1))
        assert not store.put_durably(make_entry(2, tokens=1000))
        assert store.delete(make_entry(1).info.key)
