"""The order that reuses most, in the simulator: exact chains, duplicates, fusion, and a bounded tier."""

import pytest

from ragkv.lab.simulate import RagRequest
from ragkv.lab.simulate.readers.ragpulse import Part
from ragkv.lab.simulate.reuse_order import ReuseReplay, replay_reuse_order
from ragkv.store.policies import make_policy


def request(at: float, *passages: int, system: int = 0) -> RagRequest:
    parts = (
        Part("sys_prompt", system, 10),
        *(Part("passages_ids", number, 5) for number in passages),
        Part("user_input", int(at), 2),
    )
    return RagRequest(at, "s", parts, 7)


def replayed(*requests: RagRequest, capacity: int = 1_000, fusion: bool = False, behind: bool = False) -> ReuseReplay:
    return replay_reuse_order(requests, make_policy("lru"), capacity, fusion=fusion, unseen_behind=behind)


def test_passages_in_another_order_are_exact_in_the_order_of_the_stored_chain() -> None:
    made = replayed(request(0, 1, 2, 3), request(1, 3, 2, 1))
    assert (made.exact, made.fused, made.stored) == (10 + 15, 0, 10 + 15)


def test_a_passage_that_is_missing_ends_the_chain_and_fusion_goes_on() -> None:
    asked = (request(0, 1, 2, 3), request(1, 1, 3))
    alone, both = replayed(*asked), replayed(*asked, fusion=True)
    assert (alone.exact, alone.fused) == (10 + 5, 0)
    assert (both.exact, both.fused) == (10 + 5, 5)
    assert both.stored == alone.stored + 10 + 15, "with fusion every part is also stored by content"


def test_the_longest_chain_wins() -> None:
    made = replayed(request(0, 1, 2), request(1, 2, 3, 1), request(2, 3, 1, 2))
    assert made.exact == (10 + 10) + (10 + 15)


def test_duplicates_are_dropped_and_count_as_found() -> None:
    made = replayed(request(0, 1, 1))
    assert (made.tokens, made.dropped, made.stored) == (22, 5, 15)
    assert made.found == 5 / 22


def test_system_text_that_changes_ends_all_exact_reuse_unless_it_stands_behind_the_passages() -> None:
    asked = (request(0, 1, 2), request(1, 1, 2, system=1), request(2, 1, 2, system=2))
    assert replayed(*asked).exact == 0
    assert replayed(*asked, behind=True).exact == 2 * 10


@pytest.mark.parametrize("capacity", [0, 7, 12, 20])
@pytest.mark.parametrize("fusion", [False, True])
def test_a_bounded_tier_never_finds_more_than_an_unbounded_one(capacity: int, fusion: bool) -> None:
    asked = [request(number, *(number * place % 7 for place in (1, 2, 3))) for number in range(20)]
    bounded, unbounded = replayed(*asked, capacity=capacity, fusion=fusion), replayed(*asked, fusion=fusion)
    assert 0 <= bounded.found <= unbounded.found
    assert bounded.tokens == unbounded.tokens == sum(one.tokens for one in asked)
