"""Filters select by metadata: equality, lists and ranges, between values of the same type."""

from collections.abc import Iterator
from typing import Any

import pytest

from ragkv.errors import InputError
from ragkv.retrieval import Document, Index
from ragkv.retrieval.filters import Where
from tests.retrieval.fakes import word_splitter

METADATA: dict[str, dict[str, Any]] = {
    "a": {"year": 1999, "tags": ["x", "y"], "ok": True, "name": "alpha"},
    "b": {"year": 2005.5, "tags": "x", "ok": False, "name": "beta"},
    "c": {"year": "2005", "ok": 1, "name": "gamma", "none": None},
    "d": {"odd key.[0]": "v", "back\\slash\n": "v"},
}


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index(None, splitter=word_splitter()) as index:
        index.writer.ingest(
            Document(name, f"word {name}", f"{name}.txt", metadata)
            for name, metadata in METADATA.items()
        )
        yield index


@pytest.mark.parametrize(
    ("where", "selected"),
    [
        ({}, "abcd"),
        ({"name": "beta"}, "b"),
        ({"year": 1999}, "a"),
        ({"year": {"gte": 1999, "lt": 2005.5}}, "a"),
        ({"year": {"gt": 1999}}, "b"),  # never the string "2005"
        ({"year": {"lte": "2005"}}, "c"),
        ({"name": {"gt": "alpha", "lte": "gamma"}}, "bc"),
        ({"name": ["alpha", "gamma"]}, "ac"),
        ({"name": {"in": ("alpha", 3)}}, "a"),
        ({"name": []}, ""),
        ({"name": {"ne": "alpha"}}, "bcd"),
        ({"tags": "x"}, "ab"),  # of a list, one matching item is enough
        ({"tags": "y", "year": 1999}, "a"),
        ({"tags": "y", "year": 2005.5}, ""),
        ({"ok": True}, "a"),  # never the number 1
        ({"ok": 1}, "c"),
        ({"none": None}, "c"),
        ({"odd key.[0]": "v"}, "d"),
        ({"back\\slash\n": "v"}, "d"),
        ({"year": [1999, "2005", None, True]}, "ac"),
        ({"none": [None, False], "ok": [1, 2]}, "c"),
        ({"ok": [True, False]}, "ab"),
        ({"year": [2005.5, *range(5000)], "name": ["beta", *map(str, range(5000))]}, "b"),
        ({f"absent {number}": {"ne": 1} for number in range(256)}, "abcd"),
        ({"absent": "x"}, ""),
        ({"document_id": ["a", "d"]}, "ad"),
        ({"source": {"ne": "a.txt"}}, "bcd"),
        ({"name": "'; DROP TABLE passages; --"}, ""),
    ],
)
def test_a_filter_selects_exactly_the_matching_documents(
    index: Index, where: Where, selected: str
) -> None:
    hits = index.search("word", k=10, where=where)
    assert "".join(sorted(hit.passage.document_id for hit in hits)) == selected


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"year": {"get": 1}}, "Did you mean 'gt'"),
        ({"year": {}}, "is empty"),
        ({"year": {"in": 5}}, "needs a list"),
        ({"year": {"gt": None}}, "compares with None"),
        ({"year": {"gt": True}}, "compares with True"),
        ({"year": {"eq": [1]}}, r"compares with \[1\]"),
        ({'a"b': 1}, "double quote"),
        ({"year": 2**70}, "compares with"),
        (["year"], "is a mapping"),
        ({"year\0": 1}, "NUL"),
        ({"name": "a\0b"}, "NUL"),
        ({"name": ["a", "a\0b"]}, "NUL"),
        ({"year\ud800": 1}, "surrogate"),
        ({"name": {"gt": "a\udfff"}}, "surrogate"),
        ({7: 1}, "must be a text"),
        ({"y" * 257: 1}, "257 characters"),
        ({f"absent {number}": 1 for number in range(3000)}, "3000 conditions; at most 256"),
        ({"name": ["a", ["b"]]}, r"compares with \['b'\]"),
    ],
)
def test_an_invalid_filter_is_refused_with_the_reason(
    index: Index, where: Where, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        index.search("word", where=where)
