"""A key is a value; its text and a file's bytes do not change within a format version."""

import hashlib
from pathlib import Path

import pytest
import torch

from ragkv.store import LRU, DiskTier, EntryKey
from ragkv.store.record_writing import Record
from ragkv.store.tiers import ReadOnlyDiskTier

from .entries import leased, make_entry

ENTRY = make_entry(1)
KEY = "955c90619cfff462323932a99c91247d59cfec3617fa356bfee136fc9e36b59c"
FILE_SHA256 = "4a1e094e6e136f3fe00760f6606a3bc872ffd33474d2087c82ae280e85d94c7d"


@pytest.mark.parametrize(
    "text", ["", "ab", "g" * 64, "a" * 65, "a" * 64 + ".b", "a" * 64 + "~" + "b" * 32, "."]
)
def test_what_is_no_keys_text_makes_no_key(text: str) -> None:
    assert EntryKey.from_text(text) is None


def test_names_and_bytes_stay_the_same_until_the_format_version_changes() -> None:
    assert ENTRY.info.key.to_text() == KEY and EntryKey.from_text(KEY) == ENTRY.info.key
    assert hashlib.sha256(b"".join(Record.of(ENTRY).pieces())).hexdigest() == FILE_SHA256


def test_a_directory_of_this_format_is_served_without_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "entries" / KEY[:2]
    folder.mkdir(parents=True)
    (folder / f"{KEY}.safetensors").write_bytes(b"".join(Record.of(ENTRY).pieces()))
    for tier in (ReadOnlyDiskTier(tmp_path), DiskTier(tmp_path, 10**6, LRU())):
        with leased(tier, ENTRY) as lease:
            kv = [lease.read_layer(layer) for layer in range(ENTRY.info.layers)]
            assert all(map(torch.equal, kv, ENTRY.kv)) and lease.info == ENTRY.info
        assert tier.stats().entries == 1
        tier.close()
