"""The rules for the file format of an entry."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragkv.errors import EntryDamagedError
from ragkv.store.entry import Entry, EntryKey
from ragkv.store.record import RecordHead, read_head

from .entries import IDENTITY, make_entry, stored_bytes


def write(path: Path, entry: Entry) -> Path:
    path.write_bytes(stored_bytes(entry))
    return path


def head_of(path: Path, key: EntryKey) -> RecordHead:
    with path.open("rb") as file:
        return read_head(file.fileno(), key)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_layers_of_every_dtype_come_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    entry = make_entry(identity=replace(IDENTITY, dtype=dtype))
    head = head_of(write(tmp_path / "e", entry), entry.info.key)
    assert head.info == entry.info
    data = bytearray((tmp_path / "e").read_bytes()[head.layer_start(1) : head.file_bytes])
    assert torch.equal(torch.frombuffer(data, dtype=entry.kv.dtype), entry.kv[1].flatten())


@pytest.mark.parametrize("tokens", [0, 1, 5, 256])
def test_a_record_is_its_head_and_its_layers_without_gaps(tmp_path: Path, tokens: int) -> None:
    entry = make_entry(tokens=tokens, layers=3)
    head = head_of(write(tmp_path / "e", entry), entry.info.key)
    assert head.layer_start(0) == head.head_bytes
    assert head.file_bytes == head.head_bytes + entry.kv.nbytes == (tmp_path / "e").stat().st_size


def test_a_flipped_bit_in_the_head_is_detected(tmp_path: Path) -> None:
    entry = make_entry()
    data = bytearray(write(tmp_path / "e", entry).read_bytes())
    head_end = head_of(tmp_path / "e", entry.info.key).head_bytes
    fd = os.open(tmp_path / "e", os.O_RDWR)
    try:
        for place in [*range(0, head_end, 7), *range(100)]:
            os.pwrite(fd, bytes([data[place] ^ 1 << place % 8]), place)
            with pytest.raises(EntryDamagedError):
                read_head(fd, entry.info.key)
            os.pwrite(fd, data[place : place + 1], place)
        assert read_head(fd, entry.info.key).info == entry.info
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, 7, 32, 40, 100, 600, -1, +1])
def test_a_record_of_another_length_is_damaged(tmp_path: Path, size: int) -> None:
    entry = make_entry()
    path = write(tmp_path / "e", entry)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" if size == 1 else whole[:size])
    with pytest.raises(EntryDamagedError):
        head_of(path, entry.info.key)


@pytest.mark.parametrize(
    "content", [b"\0" * 9000, b"{}" * 5000, (2**62).to_bytes(8, "little") * 999, b"\xff" * 9000]
)
def test_any_other_content_counts_as_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "e").write_bytes(content)
    with pytest.raises(EntryDamagedError):
        head_of(tmp_path / "e", "k")


def test_a_sound_record_under_another_key_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "e", make_entry(1))
    with pytest.raises(EntryDamagedError, match="of entry"):
        head_of(path, make_entry(2).info.key)
