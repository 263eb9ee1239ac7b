"""What LangChain's suite does not test: values are durable and checked, and a directory has one writer."""

from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import StoreLockedError
from ragkv.integrations.langchain import RagKVByteStore
from tests import tiny_models


def test_values_outlive_the_store(tmp_path: Path) -> None:
    store = RagKVByteStore(tmp_path)
    store.mset([("a", b"1"), ("b/é\n", b"2" * 100_000)])
    store.close()
    again = RagKVByteStore(tmp_path)
    assert again.mget(["a", "b/é\n", "c"]) == [b"1", b"2" * 100_000, None]
    assert sorted(again.yield_keys(prefix="b")) == ["b/é\n"]


@pytest.mark.parametrize("place", [0.2, 0.99])
def test_a_flipped_bit_is_a_miss(tmp_path: Path, place: float) -> None:
    store = RagKVByteStore(tmp_path)
    store.mset([("a", b"x" * 5_000), ("b", b"y")])
    file = max((tmp_path / "bytes" / "entries").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 4
    file.write_bytes(data)
    assert store.mget(["a", "b"]) == [None, b"y"]
    store.mset([("a", b"z")])
    assert store.mget(["a"]) == [b"z"]


def test_a_file_under_the_name_of_another_key_is_a_miss(tmp_path: Path) -> None:
    store = RagKVByteStore(tmp_path)
    store.mset([("a", b"1")])
    (first,) = (tmp_path / "bytes" / "entries").rglob("*.safetensors")
    store.mset([("b", b"2")])
    (second,) = (f for f in (tmp_path / "bytes" / "entries").rglob("*.safetensors") if f != first)
    second.write_bytes(first.read_bytes())
    assert store.mget(["a", "b"]) == [b"1", None]


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    store = RagKVByteStore(tmp_path)
    with pytest.raises(StoreLockedError):
        RagKVByteStore(tmp_path)
    store.close()
    RagKVByteStore(tmp_path).close()


def test_a_byte_store_can_share_a_directory_with_an_engine(tmp_path: Path) -> None:
    store = RagKVByteStore(tmp_path)
    store.mset([("a", b"1")])
    with Engine(tiny_models.model("llama"), config=EngineConfig(store=StoreConfig(directory=str(tmp_path)))) as engine:
        engine.warm([[5, 6, 7]])
        engine.gc()
    assert store.mget(["a"]) == [b"1"]
    assert list(store.yield_keys()) == ["a"]
