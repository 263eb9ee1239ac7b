"""Random bit flips in the entry files: no wrong byte is served, and every flip is a logged miss."""

import logging
import random
from pathlib import Path

import pytest

from ragkv.registry import CODECS
from ragkv.store.entry import EntryKey
from ragkv.store.opening import open_store
from tests.store.entries import IDENTITY, ids_of, make_entry, served, with_codec

from .writing import config_of

ENTRIES = [
    make_entry(number, tokens=100, identity=with_codec(sorted(CODECS)[number % len(CODECS)]))
    for number in range(6)
]


def flip(path: Path, choose: random.Random) -> None:
    """Flip one random bit of the file."""
    data = bytearray(path.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    path.write_bytes(data)


def try_one(directory: Path, choose: random.Random, log: pytest.LogCaptureFixture) -> None:
    """One flip: exactly its entry is a miss, which the log names, and can be stored again."""
    path = choose.choice(sorted(directory.glob("entries/*/*")))
    flip(path, choose)
    log.clear()
    with open_store(config_of(directory)) as store:
        (missing,) = (entry for entry in ENTRIES if not served(store, entry))
        assert missing.info.key == EntryKey.from_text(path.stem)
        assert store.stats().tiers[0].damaged == 1
        assert str(missing.info.key) in log.text
        assert store.durable.put(missing)
        assert all(served(store, entry) for entry in ENTRIES), "the store is not usable afterwards"


@pytest.mark.parametrize(
    "flips", [150, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_wrong_bytes_are_never_served_after_bit_flips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flips: int
) -> None:
    choose = random.Random(flips)
    with open_store(config_of(tmp_path)) as store:
        for entry in ENTRIES:
            assert store.durable.put(entry)
    with caplog.at_level(logging.WARNING, "ragkv"):
        for _ in range(flips):
            try_one(tmp_path, choose, caplog)


def test_the_next_read_of_an_open_store_detects_a_flip(tmp_path: Path) -> None:
    choose = random.Random(1)
    with open_store(config_of(tmp_path)) as store:
        for _ in range(50):
            assert store.durable.put(ENTRIES[0])
            (path,) = tmp_path.glob("entries/*/*")
            flip(path, choose)
            assert not served(store, ENTRIES[0])
        assert store.lease(IDENTITY, ids_of(77)) is None
