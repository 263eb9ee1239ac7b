"""Random bit flips in the entry files and the index: no wrong byte is served, and every damage is a
logged miss.
"""

import collections
import logging
import random
from pathlib import Path

import pytest

from ragkv.config import CODEC_NAMES
from ragkv.store import DiskTier, EntryKey, Store
from ragkv.store.record import read_head
from tests.store.entries import IDENTITY, ids_of, make_entry, served, with_codec

from .writing import config_of

ENTRIES = [  # a layer: 3,200 bytes and 896 of padding if raw, 2,064 and 2,032 if int8
    make_entry(number, tokens=100, identity=with_codec(CODEC_NAMES[number % len(CODEC_NAMES)]))
    for number in range(6)
]


def covered(path: Path, key: EntryKey | None) -> list[tuple[int, int]]:
    """The byte ranges of an entry file that a checksum covers: its head and its layers, without the
    padding.
    """
    with path.open("rb") as file:
        head = read_head(file.fileno(), key)
    return [
        (0, head.layer_offsets[0]),
        *((start, start + head.layer_bytes) for start in head.layer_offsets),
    ]


def flip(path: Path, choose: random.Random) -> int:
    """Flip one random bit of the file; the number of its byte."""
    place = choose.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << choose.randrange(8)]))
    return place


def trial(directory: Path, choose: random.Random, log: pytest.LogCaptureFixture) -> str:
    """One flip, and its effect in words."""
    entry_files = sorted(directory.glob("entries/*/*"))
    index_files = [path for path in sorted(directory.glob("index/*")) if path.stat().st_size]
    path = choose.choice(entry_files if choose.random() < 0.8 or not index_files else index_files)
    ranges = covered(path, EntryKey.from_text(path.stem)) if path in entry_files else []
    place = flip(path, choose)
    log.clear()
    with Store.open(config_of(directory)) as store:
        missing = [entry for entry in ENTRIES if not served(store, entry)]
        (disk,) = store.stats().tiers
        hit = any(start <= place < end for start, end in ranges)
        assert [entry.info.key for entry in missing] == (
            [EntryKey.from_text(path.stem)] if hit else []
        ), (path, place)
        assert disk.damaged == len(missing)
        assert [str(entry.info.key) in log.text for entry in missing] == [True] * len(missing)
        for entry in missing:
            assert store.put_durably(entry)
        assert all(served(store, entry) for entry in ENTRIES), (
            "the store is not usable after the flip"
        )
    if hit:
        return "damage, a logged miss"
    if ranges:
        return "padding, nothing served changed"
    return f"{path.name}, " + (
        "logged and rebuilt" if "index" in log.text else "nothing served changed"
    )


@pytest.mark.parametrize(
    "flips", [150, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_wrong_bytes_are_never_served_after_bit_flips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flips: int
) -> None:
    counts: collections.Counter[str] = collections.Counter()
    choose = random.Random(flips)
    with Store.open(config_of(tmp_path)) as store:
        for entry in ENTRIES:
            assert store.put_durably(entry)
    with caplog.at_level(logging.WARNING, "ragkv"):
        for _ in range(flips):
            counts[trial(tmp_path, choose, caplog)] += 1
    print(f"\n{dict(sorted(counts.items()))}")
    assert counts.total() == flips
    assert counts["damage, a logged miss"] > flips / 3


def test_the_next_read_of_an_open_store_detects_a_flip(tmp_path: Path) -> None:
    choose = random.Random(1)
    with Store.open(config_of(tmp_path)) as store:
        for _ in range(50):
            assert store.put_durably(ENTRIES[0])
            (path,) = tmp_path.glob("entries/*/*")
            ranges = covered(path, EntryKey.from_text(path.stem))
            place = flip(path, choose)
            hit = any(start <= place < end for start, end in ranges)
            assert served(store, ENTRIES[0]) is not hit
        assert isinstance(store._tiers[0], DiskTier)
        assert store.lease(IDENTITY, ids_of(77)) is None
