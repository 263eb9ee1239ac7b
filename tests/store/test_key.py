"""A key is a value; its text is what earlier versions wrote, so that old directories keep
working.
"""

import hashlib
from pathlib import Path

import pytest
import torch

from ragkv.store import LRU, DiskTier, Entry, EntryKey
from ragkv.store.record import Record
from ragkv.store.tiers import ReadOnlyDiskTier

from .entries import leased, make_entry

KV = make_entry(1, scored=False)
SCORES = Entry.of_scores(KV.info, "a-net", torch.ones(4, 3).half())
# What the version before keys were values wrote for these two: the text of the key, and sha256 of a
# file.
EARLIER_KEY = "6261d636561cfa18fd168b0506f6f36425cc7adfdd24c500561a96436927661e"
EARLIER = {
    KV: (EARLIER_KEY, "6686801debea4c0f53a6a991395ffe666e69b5af381c3658659b8f2c51cce57d"),
    SCORES: (
        f"{EARLIER_KEY}.a",
        "00f80de72b38bddbc6f2998694d124478475fe9bd794aafb39adfe4ee028a842",
    ),
}


def test_a_key_says_what_it_is_of_and_what_lies_next_to_it() -> None:
    key = KV.info.key
    assert (key.is_scores, SCORES.info.key.is_scores) == (False, True)
    assert (
        SCORES.info.key == key.scores == key.scores.scores and SCORES.info.key.kv == key == key.kv
    )
    assert set(key.with_scores) == {key, key.scores} and key.scores.with_scores == (key.scores,)


@pytest.mark.parametrize(
    "text", ["", "ab", "g" * 64, "a" * 65, "a" * 64 + ".b", "a" * 64 + "~" + "b" * 32, "."]
)
def test_what_is_no_keys_text_makes_no_key(text: str) -> None:
    assert EntryKey.from_text(text) is None


@pytest.mark.parametrize("entry", EARLIER, ids=["kv", "scores"])
def test_names_and_bytes_are_those_of_earlier_versions(entry: Entry) -> None:
    text, file = EARLIER[entry]
    assert entry.info.key.to_text() == text and EntryKey.from_text(text) == entry.info.key
    assert hashlib.sha256(b"".join(Record.of(entry).pieces())).hexdigest() == file


def test_a_directory_of_the_last_format_is_served(tmp_path: Path) -> None:
    """Files as an earlier version names them, without an index."""
    folder = tmp_path / "entries" / EARLIER_KEY[:2]
    folder.mkdir(parents=True)
    for entry, (text, _) in EARLIER.items():
        (folder / f"{text}.safetensors").write_bytes(b"".join(Record.of(entry).pieces()))
    for tier in (ReadOnlyDiskTier(tmp_path), DiskTier(tmp_path, 10**6, LRU())):
        for entry in EARLIER:
            with leased(tier, entry) as lease:
                kv = [lease.read_layer(layer) for layer in range(entry.info.layers)]
                assert all(map(torch.equal, kv, entry.kv)) and lease.info == entry.info
        assert tier.stats().entries == 1
        tier.close()
