"""What of a prompt is fused, and how many tokens are promised."""

from typing import Any

import pytest

from ragkv.errors import InputError
from ragkv.types import Text
from ragkv.vllm.chunk_index import ChunkIndex
from ragkv.vllm.layout import FusedLayout, Wish, layout

PREFIX = (1, 2)
A = tuple(range(10, 20))
B = tuple(range(30, 40))
QUESTION = (5, 6, 7)


@pytest.fixture
def index() -> ChunkIndex:
    return ChunkIndex(lambda: [A, B], refresh_s=60.0)


def laid_out(
    index: ChunkIndex, *ids: int, prefix: tuple[int, ...] = PREFIX, **params: Any
) -> FusedLayout | None:
    return layout(ids, Wish.of({"ragkv": params}, len(ids)), index, prefix)


def test_everything_up_to_the_last_chunk_is_promised_and_the_question_is_not(
    index: ChunkIndex,
) -> None:
    found = laid_out(index, *PREFIX, *A, 8, *B, *QUESTION)
    assert found is not None
    assert found.promised == len(PREFIX) + len(A) + 1 + len(B)
    runs = [(type(run) is Text, run.token_ids) for run in found.runs]
    assert runs == [(True, PREFIX), (False, A), (True, (8,)), (False, B)]
    assert found.question(whole=False) == QUESTION[:1]
    assert found.question(whole=True) == QUESTION


def test_the_last_token_is_never_promised(index: ChunkIndex) -> None:
    found = laid_out(index, *PREFIX, *A)
    assert found is not None
    assert found.promised == len(PREFIX) + len(A) - 1
    assert found.question(whole=False) == ()


def test_only_the_own_prefix_opens_the_prompt(index: ChunkIndex) -> None:
    own = laid_out(index, *PREFIX, *A, *QUESTION)
    other = laid_out(index, 3, 4, *A, *QUESTION)
    assert own is not None and other is not None
    assert isinstance(own.runs[0], Text) and own.runs[0].opening
    assert isinstance(other.runs[0], Text) and not other.runs[0].opening


def test_a_prompt_without_chunks_is_not_fused(index: ChunkIndex) -> None:
    assert laid_out(index, *PREFIX, *QUESTION) is None
    assert laid_out(index, *PREFIX, *A, *QUESTION, reuse="none") is None
    assert laid_out(index, 1) is None


def test_named_chunks_are_taken_as_they_are_named(index: ChunkIndex) -> None:
    found = laid_out(
        index, *PREFIX, 7, 7, 7, *QUESTION, chunks=[[2, 5]], ratio=0.5, selector="hkvd"
    )
    assert found is not None
    assert [run.token_ids for run in found.runs] == [PREFIX, (7, 7, 7)]
    assert found.options == {"ratio": 0.5, "selector": "hkvd"}


@pytest.mark.parametrize(
    "wish",
    [
        {"chunks": [[0, 3], [2, 4]]},
        {"chunks": [[3, 3]]},
        {"chunks": [[2, 9]]},
        {"chunks": [[-1, 2]]},
        {"chunks": [[0, 1, 2]]},
        {"chunks": "ab"},
        {"reuse": "prefix"},
        {"rate": 0.1},
        {"report_of": 5},
        {"report_of": "x" * 65},
        [1],
    ],
)
def test_a_wish_that_is_not_understood_is_an_input_error(wish: Any) -> None:
    with pytest.raises(InputError, match=r"kv_transfer_params\.ragkv"):
        Wish.of({"ragkv": wish}, 5)


def test_parameters_of_other_connectors_are_left_alone() -> None:
    assert Wish.of({"do_remote_prefill": True}, 5) == Wish()
    assert Wish.of(None, 5) == Wish()
    assert Wish.of({"ragkv": {"name": "n", "reuse": "none"}}, 9) == Wish(reuse="none", name="n")
