"""The format of values: what a layer group holds, and that nothing but what was written
verifies.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.cluster import entry_values
from ragkv.cluster.entry_values import RemoteHead
from ragkv.errors import EntryDamagedError
from ragkv.store.record import checksum, record_of
from ragkv.store.stored_form import stored_form
from tests.store.entries import make_entry


@pytest.mark.parametrize(
    ("group_bytes", "groups"), [(1, 12), (128, 12), (129, 6), (1024, 2), (10**9, 1)]
)
def test_a_layer_group_has_the_fewest_layers_that_make_its_bytes(
    group_bytes: int, groups: int
) -> None:
    entry = stored_form(make_entry(1, layers=12))  # of 128 bytes each
    assert len(entry_values.pack(entry, group_bytes, checksum)) == groups


@pytest.mark.parametrize("secret", [None, "secret"])
@given(data=st.data())
def test_a_value_with_a_changed_byte_is_found_damaged(
    secret: str | None, data: st.DataObject
) -> None:
    digest = entry_values.digest_of(secret)
    entry = make_entry(1, layers=3)
    key = entry.info.key
    packed = entry_values.pack(stored_form(entry), 1, digest)
    layer_group = data.draw(st.integers(0, 2))
    changed = bytearray(packed[layer_group])
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))

    def parsed(value: bytes) -> RemoteHead:
        return entry_values.parse_head(key, value, lambda size: value[:size], digest)

    with pytest.raises(EntryDamagedError):
        head = parsed(bytes(changed) if layer_group == 0 else packed[0])
        start, _ = head.place_of(layer_group)
        head.check(layer_group, changed[start:])


def test_equal_content_has_one_digest_and_other_content_another() -> None:
    def content_digest(number: int, group_bytes: int = 1) -> bytes:
        entry = make_entry(number, layers=3)
        value = entry_values.pack(stored_form(entry), group_bytes, checksum)[0]
        return entry_values.parse_head(
            entry.info.key, value, lambda size: value[:size], checksum
        ).content_digest

    assert content_digest(1) == content_digest(1)
    assert len({content_digest(1), content_digest(2), content_digest(1, 200)}) == 3


def test_the_head_of_a_file_is_not_that_of_a_value() -> None:
    entry = make_entry(1)
    head, _ = record_of(stored_form(entry))
    with pytest.raises(EntryDamagedError, match="not that of a value"):
        entry_values.parse_head(entry.info.key, head, lambda size: head[:size], checksum)
