"""The rules for an entry's key and shape."""

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ragkv.store
from ragkv.store import EncodedEntry, Entry, Identity, ids_bytes

from .entries import IDENTITY, make_entry, other_identities


@pytest.mark.parametrize(("field", "identity"), other_identities())
def test_every_field_of_the_identity_changes_the_key(field: str, identity: Identity) -> None:
    assert identity.key([1, 2]) != IDENTITY.key([1, 2]), field


def test_the_identities_of_these_tests_vary_every_field() -> None:
    assert {field for field, _ in other_identities()} == {field.name for field in dataclasses.fields(Identity)}


def test_tokens_and_their_order_change_the_key() -> None:
    assert len({IDENTITY.key(ids) for ids in ([1, 2], [2, 1], [1], [1, 2, 0], [258], [])}) == 6


def test_moving_text_between_fields_changes_the_key() -> None:
    one = dataclasses.replace(IDENTITY, adapter="ab", tokenizer="c")
    two = dataclasses.replace(IDENTITY, adapter="a", tokenizer="bc")
    assert one.key([1]) != two.key([1])


def test_keys_are_the_same_in_every_process() -> None:
    program = "from tests.store.entries import IDENTITY; print(IDENTITY.key([1, 2, 3]).to_text())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == IDENTITY.key([1, 2, 3]).to_text()


def test_no_module_of_the_store_calls_hash() -> None:
    for file in Path(ragkv.store.__file__).parent.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "hash"], file


def test_token_ids_are_hashed_as_little_endian_int64() -> None:
    assert ids_bytes([1, -1]) == b"\x01" + b"\x00" * 7 + b"\xff" * 8


def test_an_identity_is_equal_after_json_and_back() -> None:
    assert Identity.from_json(IDENTITY.to_json()) == IDENTITY


def test_an_entry_of_another_shape_or_dtype_is_refused() -> None:
    entry = make_entry()
    with pytest.raises(ValueError, match=r"\(2, 2, 1, 4, 8\) bfloat16"):
        Entry(entry.info, entry.kv.float())
    with pytest.raises(ValueError, match=r"\(2, 2, 1, 4, 8\)"):
        Entry(entry.info, entry.kv[:1])
    for scores in (torch.zeros(3, 1).half(), torch.zeros(4).half(), torch.zeros(4, 0).half(), torch.zeros(4, 1)):
        with pytest.raises(ValueError, match=r"\(4, C\) float16"):
            Entry(entry.info, entry.kv, scores)


def test_a_compact_entry_keeps_no_larger_tensor_alive() -> None:
    entry = make_entry()
    large = torch.cat([entry.kv, entry.kv])
    compact = EncodedEntry.of(Entry(entry.info, large[:2], entry.sensitivity)).compact()
    assert compact.layers.untyped_storage().nbytes() == entry.kv.nbytes
    assert torch.equal(compact.layers, entry.kv)
    assert compact.compact() is compact
