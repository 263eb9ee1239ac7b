"""Pending deletions: noted durably, and read again after a restart."""

import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ragkv.cluster import RemoteTier, pending_deletions, redis_connector, s3_connector
from ragkv.cluster.connector import Connector
from ragkv.cluster.pending_deletions import PendingDeletions
from ragkv.config import RedisConfig, S3Config, StoreConfig
from ragkv.errors import StoreError
from ragkv.store.entry import EntryKey
from ragkv.store.opening import open_store
from ragkv.store.record import Bytes, checksum
from tests.faults import os_error, raising
from tests.scheduling.helpers import begin


def test_pending_deletions_survive_a_restart_until_they_are_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "deletions.json"
    noted = PendingDeletions(path)
    noted.add(EntryKey("a" * 64))
    noted.add(EntryKey("b" * 64))
    noted.confirm(EntryKey("a" * 64))
    assert PendingDeletions(path).keys == {EntryKey("b" * 64)}


def test_a_file_of_pending_deletions_that_cannot_be_read_counts_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "deletions.json"
    path.write_text("{broken")
    assert PendingDeletions(path).keys == frozenset()


def test_pending_deletions_that_cannot_be_read_now_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deletions.json"
    PendingDeletions(path).add(EntryKey("b" * 64))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", raising(os_error(errno.EMFILE)))
        with pytest.raises(StoreError, match="cannot be read"):
            PendingDeletions(path)
    assert PendingDeletions(path).keys == {EntryKey("b" * 64)}


def test_a_deletion_that_neither_the_server_nor_the_disk_takes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = RedisConfig(url="redis://localhost:1", timeout_s=0.5)
    config = StoreConfig(memory_bytes=0, directory=str(tmp_path), redis=away)
    key = EntryKey("a" * 64)
    with open_store(config, "redis") as store:
        with monkeypatch.context() as patch:
            patch.setattr(pending_deletions, "replace_file", raising(os_error(errno.EROFS)))
            with pytest.raises(StoreError, match="cannot be noted"):
                store.delete(key)
        assert not store.contains(key)
        assert store.delete(key) is False  # noted now
    (path,) = tmp_path.glob("deletions-redis-*.json")
    assert PendingDeletions(path).keys == {key}


@pytest.mark.parametrize("fails", ["pending deletions", "thread"])
@pytest.mark.parametrize(
    ("config", "module", "name"),
    [
        (StoreConfig(redis=RedisConfig(url="redis://localhost:1")), redis_connector, "Redis"),
        (StoreConfig(s3=S3Config(bucket="b", endpoint="http://localhost:1")), s3_connector, "S3"),
    ],
)
def test_a_remote_that_cannot_be_opened_leaves_no_connector_open(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: StoreConfig,
    module: ModuleType,
    name: str,
    fails: str,
) -> None:
    connector = getattr(module, f"{name}Connector")
    open_connectors = list[object]()

    class Counted(connector):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            open_connectors.append(self)

        def close(self) -> None:
            super().close()
            open_connectors.remove(self)

    monkeypatch.setattr(module, f"{name}Connector", Counted)
    if fails == "thread":
        monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("no thread")))
    else:
        monkeypatch.setattr(Path, "read_text", raising(os_error(errno.EMFILE)))
    directory = str(tmp_path) if fails == "pending deletions" else None
    with pytest.raises((StoreError, RuntimeError)):
        open_store(replace(config, memory_bytes=0, directory=directory), name.lower())
    assert not open_connectors


class Slow(Connector):
    """A server without entries, which confirms a deletion when it may."""

    kind = "slow"

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may = threading.Event()
        self.deleted = list[EntryKey]()

    def find(self, keys: Sequence[EntryKey]) -> list[Bytes | None]:
        return [None for _ in keys]

    def get(self, *_: object, **__: object) -> None:
        return None

    def put(self, key: EntryKey, values: Sequence[Bytes]) -> bool:
        return False

    def delete(self, key: EntryKey, content_digest: bytes | None = None) -> bool:
        self.asked.set()
        assert self.may.wait(60)
        self.deleted.append(key)
        return True

    def all_keys(self) -> Iterator[EntryKey]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""


def test_a_tier_that_closes_waits_for_one_pending_deletion_and_keeps_the_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "deletions.json"
    pending = PendingDeletions(path)
    keys = [EntryKey(letter * 64) for letter in "abc"]
    pending.add(*keys)
    server = Slow()
    tier = RemoteTier(server, RedisConfig(url="redis://localhost:1"), checksum, pending, 0)
    assert server.asked.wait(60)
    closing = begin(tier.close)
    assert tier._closing.wait(60)
    server.may.set()
    closing.join(60)
    assert len(server.deleted) == 1
    assert PendingDeletions(path).keys == set(keys) - set(server.deleted)
