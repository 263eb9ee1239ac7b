"""Where fusing pays: against a full recompute, and against the time that entries took to make."""

import dataclasses

import pytest

from ragkv.config import PricesConfig
from ragkv.fusion.controller import decide
from ragkv.fusion.estimators import Load, Shape, pays, recompute_ttft_s, ttft_s
from ragkv.fusion.profile import LengthFit, RecomputeFit, TierSpeed
from ragkv.lab.break_even import Kind, least_tokens, request, uses_until_paid
from tests.fusion.profiles import profile

IN_MEMORY = profile(tiers={"memory": TierSpeed(0.0, 0.0)})  # a prefill takes 1 s + 30 ms a token
KIND = Kind("memory", 0.1, chunk_tokens=100, question_tokens=10)


def test_a_recompute_without_exact_chunks_takes_as_long_as_a_full_prefill() -> None:
    assert recompute_ttft_s(IN_MEMORY, Shape(100, 10, 110), [Load("memory", 100)]) == pytest.approx(1 + 0.03 * 110)


def test_exact_chunks_and_history_are_not_recomputed() -> None:
    loads = [Load("memory", 40, fused=False), Load("memory", 30), Load("memory", 20, fixed=True)]
    found = recompute_ttft_s(IN_MEMORY, Shape(30, 10, 100), loads)
    assert found == pytest.approx(0.5 + 2 * (1.0 + 0.01 * 40))  # two layers of 40 rows


def test_fusing_must_be_faster_by_the_margin_to_pay() -> None:
    assert pays(1.0, 1.1) and not pays(1.0, 1.04) and not pays(1.0, 0.5)
    assert pays(0.003, 0.0040) and not pays(0.003, 0.0039), "finding entries and selecting take time, too"


def test_the_least_number_of_tokens_is_where_the_estimates_cross() -> None:
    made = dataclasses.replace(IN_MEMORY, recompute=RecomputeFit(1.0, 0.0, 0.001, 0.0))
    least = least_tokens(made, KIND)
    assert least is not None and least > 16
    for tokens, better in ((least, True), (round(least / 2**0.25), False)):
        shape, loads = request(KIND, tokens)
        assert pays(ttft_s(made, shape, 0.1, loads), recompute_ttft_s(made, shape, loads)) is better


def test_where_fusing_never_pays_there_is_no_least_number() -> None:
    slow = profile(tiers={"memory": TierSpeed(0.0, 1.0)})
    assert least_tokens(slow, KIND) is None


@pytest.mark.parametrize("tokens", [16, 99, 100, 101, 1000])
def test_a_request_has_its_tokens_in_chunks_of_which_the_first_is_exact(tokens: int) -> None:
    shape, loads = request(KIND, tokens)
    assert len(loads) >= 2 and max(load.tokens for load in loads) <= 100
    assert [load.fused for load in loads] == [False] + [True] * (len(loads) - 1)
    assert shape.fused_tokens == sum(load.tokens for load in loads[1:])
    assert abs(sum(load.tokens for load in loads) - tokens) < len(loads)


def test_an_entry_is_paid_when_its_uses_have_saved_the_time_it_took() -> None:
    assert uses_until_paid(IN_MEMORY, 100, passes=2.0, gain_s=3.0) == 3  # 8 s: three uses save 9 s
    assert uses_until_paid(IN_MEMORY, 100, passes=2.0, gain_s=0.0) is None


class TestDecision:
    def test_where_fusing_does_not_pay_every_fused_chunk_is_computed(self) -> None:
        cheap = dataclasses.replace(IN_MEMORY, prefill=LengthFit(0.1, 0.001, 0.0))
        loads = [Load("memory", 20, fused=False, fixed=True), Load("memory", 50), Load("memory", 30)]
        decision = decide(cheap, Shape(80, 10, 110), loads[1:], 0.15, PricesConfig())
        assert decision.computed == (0, 1)
        assert "fusing does not pay for 80 tokens" in decision.why[0]

    def test_where_fusing_pays_nothing_is_computed(self) -> None:
        decision = decide(IN_MEMORY, Shape(800, 10, 810), [Load("memory", 800)], 0.15, PricesConfig())
        assert decision.computed == ()
        assert decision.ttft_s < recompute_ttft_s(IN_MEMORY, Shape(800, 10, 810), [Load("memory", 800)])
