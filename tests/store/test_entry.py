"""The rules for an entry's key and shape."""

import dataclasses

import pytest

from ragkv.store.entry import Entry, Identity

from .entries import IDENTITY, make_entry, other_identities


@pytest.mark.parametrize(("field", "identity"), other_identities())
def test_every_field_of_the_identity_changes_the_key(field: str, identity: Identity) -> None:
    assert identity.key([1, 2]) != IDENTITY.key([1, 2]), field


def test_the_identities_of_these_tests_vary_every_field() -> None:
    assert {field for field, _ in other_identities()} == {
        field.name for field in dataclasses.fields(Identity)
    }


def test_tokens_and_their_order_change_the_key() -> None:
    assert len({IDENTITY.key(ids) for ids in ([1, 2], [2, 1], [1], [1, 2, 0], [258], [])}) == 6


def test_moving_text_between_fields_changes_the_key() -> None:
    one = dataclasses.replace(IDENTITY, lora="ab", tokenizer="c")
    two = dataclasses.replace(IDENTITY, lora="a", tokenizer="bc")
    assert one.key([1]) != two.key([1])


def test_stored_json_keeps_the_names_that_its_fields_had() -> None:
    stored = (
        '{"adapter":"l","architecture":"a","behind":"n","codec":"raw","context":"c",'
        '"dtype":"float32","format_version":5,"rope":"r","tenant":"","tokenizer":"t","weights":"w"}'
    )
    identity = Identity("w", "a", "r", "float32", "l", "t", "c", neutral="n")
    assert identity.to_json() == stored
    assert Identity.from_json(stored) == identity
    with pytest.raises(TypeError):
        Identity.from_json(stored.replace("adapter", "lora"))


def test_an_entry_of_another_shape_or_dtype_is_refused() -> None:
    entry = make_entry()
    for kv in (entry.kv.float(), entry.kv[:1]):
        with pytest.raises(ValueError, match=r"\(2, 2, 1, 4, 8\) bfloat16"):
            Entry(entry.info, kv)
