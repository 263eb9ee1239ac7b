"""The rules for the file format of an entry."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ragkv.errors import EntryDamagedError
from ragkv.store import Entry, EntryKey
from ragkv.store.record import ALIGNMENT, RecordHead, bytes_of, read_fully, read_head
from ragkv.store.record_writing import Record

from .entries import IDENTITY, make_entry


def write(path: Path, entry: Entry) -> Path:
    path.write_bytes(b"".join(bytes(piece) for piece in Record.of(entry).pieces()))
    return path


def head_of(path: Path, key: EntryKey) -> RecordHead:
    with path.open("rb") as file:
        return read_head(file.fileno(), key)


@pytest.mark.parametrize("tokens", [0, 1, 5, 256])  # 256 tokens: one layer is exactly two pages
def test_the_safetensors_library_reads_a_record(tmp_path: Path, tokens: int) -> None:
    entry = make_entry(tokens=tokens)
    tensors = load_file(write(tmp_path / "entry.safetensors", entry))
    assert tensors["token_ids"].tolist() == list(entry.info.token_ids)
    assert torch.equal(tensors["layer.0000"], entry.kv[0])
    assert torch.equal(tensors["layer.0001"], entry.kv[1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_layers_of_every_dtype_come_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    entry = make_entry(identity=replace(IDENTITY, dtype=dtype))
    head = head_of(write(tmp_path / "e", entry), entry.info.key)
    assert head.info == entry.info
    into = torch.empty_like(entry.kv[1])
    with (tmp_path / "e").open("rb") as file:
        read_fully(file.fileno(), bytes_of(into), head.layer_offsets[1])
    assert torch.equal(into, entry.kv[1])


def test_layers_begin_and_the_file_ends_at_multiples_of_a_page(tmp_path: Path) -> None:
    entry = make_entry(tokens=5, layers=3)
    head = head_of(write(tmp_path / "e", entry), entry.info.key)
    assert [offset % ALIGNMENT for offset in head.layer_offsets] == [0, 0, 0]
    assert head.file_bytes % ALIGNMENT == 0
    assert head.file_bytes == (tmp_path / "e").stat().st_size


def test_a_flipped_bit_in_the_head_is_detected(tmp_path: Path) -> None:
    entry = make_entry()
    data = bytearray(write(tmp_path / "e", entry).read_bytes())
    head_end = head_of(tmp_path / "e", entry.info.key).layer_offsets[0]
    fd = os.open(tmp_path / "e", os.O_RDWR)
    try:
        for place in [*range(0, head_end, 7), *range(600)]:
            os.pwrite(fd, bytes([data[place] ^ 1 << place % 8]), place)
            with pytest.raises(EntryDamagedError):
                read_head(fd, entry.info.key)
            os.pwrite(fd, data[place : place + 1], place)
        assert read_head(fd, entry.info.key).info == entry.info
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, 7, 100, 4096, 5000, -1, +1])
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
