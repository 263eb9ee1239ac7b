"""The format of values: what a layer group holds, and that nothing but what was written verifies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import EntryDamagedError
from ragkv.store import EncodedEntry
from ragkv.store.remote import values
from ragkv.store.remote.values import Digester
from tests.store.entries import make_entry


@pytest.mark.parametrize(("group_bytes", "groups"), [(1, 12), (128, 12), (129, 6), (1024, 2), (10**9, 1)])
def test_a_layer_group_has_the_fewest_layers_that_make_its_bytes(group_bytes: int, groups: int) -> None:
    entry = EncodedEntry.of(make_entry(1, layers=12))  # of 128 bytes each
    assert len(values.pack(entry, group_bytes, Digester())) == groups


@pytest.mark.parametrize("secret", [None, "secret"])
@given(data=st.data())
@settings(deadline=None)
def test_a_value_with_a_changed_byte_is_found_damaged(secret: str | None, data: st.DataObject) -> None:
    digester, entry = Digester(secret), make_entry(1, layers=3)
    key, packed = entry.info.key, values.pack(EncodedEntry.of(entry), 1, digester)
    layer_group = data.draw(st.integers(0, 2))
    changed = bytearray(packed[layer_group])
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    head = values.parse_head(key, values.parse(key, packed[0], digester))
    with pytest.raises(EntryDamagedError):
        header = values.parse(key, bytes(changed), digester)
        head.check_group(header, layer_group)
        header.check_payload(key, changed[header.payload_at :], digester)


def test_equal_content_has_one_digest_and_other_content_another() -> None:
    def content_digest(number: int, group_bytes: int = 1) -> bytes:
        entry = make_entry(number, layers=3)
        packed = values.pack(EncodedEntry.of(entry), group_bytes, Digester())
        return values.parse(entry.info.key, packed[0], Digester()).content_digest

    assert content_digest(1) == content_digest(1)
    assert len({content_digest(1), content_digest(2), content_digest(1, 200)}) == 3
