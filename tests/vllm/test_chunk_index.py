"""Chunks are found in a prompt by their token ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.vllm.chunk_index import HEAD_TOKENS, ChunkIndex, Occurrence

A = tuple(range(10, 22))
B = tuple(range(40, 49))
LONGER = tuple(range(10, 25))


def index_of(*chunks: tuple[int, ...]) -> ChunkIndex:
    return ChunkIndex(lambda: chunks, refresh_s=60.0)


def test_chunks_are_found_wherever_they_stand() -> None:
    index = index_of(A, B)
    assert index.find([1, *A, 7, 7, *B, *A, 9]) == [
        Occurrence(1, 13),
        Occurrence(15, 24),
        Occurrence(24, 36),
    ]


def test_the_longest_of_two_chunks_that_begin_alike_is_found() -> None:
    index = index_of(A, LONGER)
    assert index.find(LONGER) == [Occurrence(0, len(LONGER))]
    assert index.find([*A, 99]) == [Occurrence(0, len(A))]


def test_a_chunk_is_found_although_its_edges_merged_with_the_text_around_it() -> None:
    index = index_of(A, B[:8])
    assert index.find([1, *A[:-1], 99]) == [Occurrence(1, 12, A)]
    assert index.find([1, *A[:-2], 99]) == [Occurrence(1, 11, A)]
    assert index.find([99, *A[1:], 1]) == [Occurrence(1, 12, A, 1)]
    assert index.find([99, *A[1:-1], 99]) == [Occurrence(1, 11, A, 1)]
    assert index.find([99, *A[2:], 99]) == index.find([*A[:-3], 99]) == []
    assert index.find([*B[:7], 99, 98]) == [], "what is left of a short chunk proves nothing"
    assert len(index_of(A[: HEAD_TOKENS - 1])) == 0, "it is not searched"


@given(
    st.lists(st.integers(1, 3), max_size=60),
    st.lists(st.lists(st.integers(1, 3), min_size=8, max_size=12)),
)
def test_every_occurrence_is_a_chunk_and_none_overlap(
    ids: list[int], chunks: list[list[int]]
) -> None:
    known = [tuple(chunk) for chunk in chunks]
    index = index_of(*known)
    found = index.find(ids)
    at = 0
    for one in found:
        assert at <= one.start
        part = tuple(ids[one.start : one.stop])
        assert part == one.whole[one.offset :][: len(part)] if one.whole else part in known
        assert not one.whole or one.whole in known
        at = one.stop


def test_what_another_process_stores_is_found_and_a_list_that_cannot_be_read_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragkv.vllm.chunk_index.SHARE_OF_TIME", 1e9)
    lists: list[list[tuple[int, ...]]] = [[A], [A, B]]

    def read() -> list[tuple[int, ...]]:
        if not lists:
            raise OSError("the disk is gone")
        return lists.pop(0)

    index = ChunkIndex(read, refresh_s=0.0)
    assert [len(index.find([*A, *B])) for _ in range(3)] == [1, 2, 2]
