"""A key is a value; its text and a file's bytes do not change within a format version."""

import hashlib
from pathlib import Path

import pytest
import torch

from ragkv.store.entry import EntryKey
from ragkv.store.policies import LRU
from ragkv.store.tiers import DiskTier, ReadOnlyDiskTier

from .entries import leased, make_entry, stored_bytes

ENTRY = make_entry(1)
FILE = stored_bytes(ENTRY)
KEY = "955c90619cfff462323932a99c91247d59cfec3617fa356bfee136fc9e36b59c"
FILE_SHA256 = "f0e8b8ac9d3fd51361e1103506df2975b2cdaf3392c5a45c4b6638dea3aa2c0b"


@pytest.mark.parametrize(
    "text", ["", "ab", "g" * 64, "a" * 65, "a" * 64 + ".b", "a" * 64 + "~" + "b" * 32, "."]
)
def test_what_is_no_keys_text_makes_no_key(text: str) -> None:
    assert EntryKey.from_text(text) is None


def test_names_and_bytes_stay_the_same_until_the_format_version_changes() -> None:
    assert ENTRY.info.key.to_text() == KEY and EntryKey.from_text(KEY) == ENTRY.info.key
    assert hashlib.sha256(FILE).hexdigest() == FILE_SHA256


def test_a_directory_of_this_format_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "entries" / KEY[:2]
    folder.mkdir(parents=True)
    (folder / f"{KEY}.kv").write_bytes(FILE)
    for tier in (ReadOnlyDiskTier(tmp_path), DiskTier(tmp_path, 10**6, LRU())):
        with leased(tier, ENTRY) as lease:
            kv = [lease.read_layer(layer) for layer in range(ENTRY.info.layers)]
            assert all(map(torch.equal, kv, ENTRY.kv)) and lease.info == ENTRY.info
        assert tier.stats().entries == 1
        tier.close()
