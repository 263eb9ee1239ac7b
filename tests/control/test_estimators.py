"""Estimates: equal to results by hand, and monotonic."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragkv.control.controller import rows_share
from ragkv.control.estimators import exposed_s, load_s, ttft_s
from ragkv.control.profile import LengthFit, Profile, RecomputeFit, TierSpeed, TimedPoint
from ragkv.control.token_counts import Load, TokenCounts
from ragkv.fusion import Plan, Span, SpanKind, SpanState
from ragkv.fusion.selectors import Attention, Selection
from ragkv.fusion.static_selectors import FirstK

from .profiles import disk, profile

COUNTS = TokenCounts(fused_tokens=100, computed_rows=10, prompt_tokens=110)
FREE = LengthFit(0.0, 0.0, 0.0)

times = st.floats(0, 10)
profiles = st.builds(
    lambda fixed, row, key, place, start, layers: profile(
        recompute=RecomputeFit(fixed, 0.0, row, key / 1000),
        place_token_layer_s=place,
        start_s=start,
        layers=layers,
    ),
    *(times,) * 5,
    st.integers(1, 5),
)
ratios = st.floats(0, 1)
shapes = st.builds(
    lambda fused, computed, exact, kind: TokenCounts(
        fused, computed, fused + computed + exact, kind, 2
    ),
    *(st.integers(0, 500),) * 3,
    st.sampled_from(Selection),
)


def test_recompute_time_counts_selected_tokens_the_question_placing_and_the_keys_of_each_row() -> (
    None
):
    placing = profile(place_token_layer_s=0.001)
    seeing = profile(recompute=RecomputeFit(0.0, 0.0, 0.01, 0.001))

    def layer_s(made: Profile, ratio: float, counts: TokenCounts) -> float:
        """Of the two whose work counts, if loading takes no time."""
        return (ttft_s(made, counts, ratio, [Load("memory", 100)]) - made.start_s) / 2

    assert layer_s(profile(), 0.0, COUNTS) == pytest.approx(1 + 0.01 * 10)
    assert layer_s(profile(), 0.5, COUNTS) == pytest.approx(1 + 0.01 * 60)
    assert layer_s(placing, 0.5, COUNTS) == pytest.approx(1 + 0.01 * 60 + 0.001 * 100)

    assert layer_s(seeing, 0.0, TokenCounts(0, 10, 100)) == pytest.approx(10 * (0.01 + 0.1))


def test_with_a_checking_selector_every_candidate_passes_the_first_layer() -> None:
    narrowing = dataclasses.replace(COUNTS, selection=Selection.NARROWING)
    assert ttft_s(profile(), narrowing, 0.1, []) == pytest.approx(0.5 + (1 + 1.1) + (1 + 0.2))
    assert ttft_s(profile(), narrowing, 0.0, []) == ttft_s(profile(), COUNTS, 0.0, [])


def test_an_asking_selector_recomputes_while_the_layers_above_the_asked_ones_load() -> None:
    asking = dataclasses.replace(COUNTS, selection=Selection.ASKING, asked_layers=2)
    free = [Load("memory", 100)]
    # asking takes 1.1 s a layer, recompute 1.6 s
    assert ttft_s(profile(), asking, 0.5, free) == pytest.approx(0.5 + 2 * 1.1 + 2 * 1.6)
    unasked = dataclasses.replace(asking, unasked_rows=4)
    assert ttft_s(profile(), unasked, 0.5, free) == pytest.approx(0.5 + 2 * 1.06 + 2 * 1.6)
    leading = dataclasses.replace(asking, leading_rows=4)
    assert ttft_s(profile(), leading, 0.5, free) == pytest.approx(0.5 + 2 * 1.1 + 2 * 1.56)
    slow = [Load("disk", 100)]  # 100 s a layer: the third one loads while two are recomputed
    assert ttft_s(profile(), asking, 0.5, slow) == pytest.approx(0.5 + 3 * 100)
    even = profile(tiers={"disk": disk(0.02)})  # 2 s a layer
    assert ttft_s(even, asking, 0.5, slow) == pytest.approx(0.5 + 2 * 2 + 1.1 + 2 * 1.6)
    early = dataclasses.replace(
        asking, early_tokens=20
    )  # asking takes 1.3 s, the upper layer 1.8 s
    assert ttft_s(profile(), early, 0.5, free) == pytest.approx(0.5 + 2 * 1.3 + 2 * 1.6)
    one = dataclasses.replace(asking, asked_layers=1)  # the upper layer is recomputed once
    assert ttft_s(profile(), one, 0.5, free) == pytest.approx(0.5 + 1.1 + 1.6 + 1.6)


def test_the_model_waits_for_what_recompute_does_not_hide() -> None:
    slow = [Load("disk", 100)]
    assert exposed_s(profile(), COUNTS, 0.5, slow) == pytest.approx(300 - 2 * 1.6)
    quick = profile(tiers={"disk": disk(0.01)})
    assert exposed_s(quick, COUNTS, 0.5, slow) == pytest.approx(1.0)  # the first layer
    assert exposed_s(quick, COUNTS, 0.5, []) == 0.0


def test_checks_and_unpacking_delay_every_layer_that_is_read() -> None:
    busy = profile(tiers={"disk": dataclasses.replace(disk(0.0), hindered_s_per_byte=1e-6)})
    took_s = ttft_s(busy, COUNTS, 0.5, [Load("disk", 100)])
    assert took_s == pytest.approx(0.5 + 2 * (1.6 + 0.1))
    slower = busy.tier("disk").times(5.0)
    assert slower.hindered_s_per_byte == 1e-6, "a slower disk is as quick to check"


def test_the_share_of_rows_counts_the_question_twice_up_to_the_last_asked_layer() -> None:
    spans = (
        Span(SpanKind.CHUNK, 0, 100, SpanState.FUSED),
        Span(SpanKind.QUESTION, 100, 110, SpanState.COMPUTED),
    )
    plan = Plan.of(torch.arange(110), spans)
    asking = Attention((0.5, 0.75))
    assert rows_share(plan, FirstK(), 0.5, 4) == pytest.approx(60 / 110)
    assert rows_share(plan, asking, 0.5, 4) == pytest.approx((60 + 10 * 3 / 4) / 110)
    assert rows_share(plan, asking, 0.0, 4) == pytest.approx(10 / 110)
    assert rows_share(plan, FirstK(), 0.0, 4) == pytest.approx(10 / 110)
    assert rows_share(plan, FirstK(), 1.0, 4) == 1.0
    assert TokenCounts.of(plan, asking, 4, early=7).early_tokens == 7


def test_loading_takes_bytes_over_bandwidth_plus_one_latency_per_slice() -> None:
    late = profile(tiers={"disk": disk(0.002, latency_s=0.1), "memory": TierSpeed(0.0, 0.0)})
    assert load_s(late, [Load("disk", 50)]) == pytest.approx(0.1 + 0.1)
    assert load_s(late, [Load("disk", 50), Load("disk", 50)]) == pytest.approx(0.4)
    assert load_s(late, [Load("disk", 50), Load("memory", 5000)]) == pytest.approx(0.2)
    assert load_s(late, []) == 0


def test_slice_times_are_interpolated_between_measured_sizes_and_follow_the_fit_beyond_them() -> (
    None
):
    points = (TimedPoint(1000, 0.1), TimedPoint(3000, 0.3), TimedPoint(5000, 1.3))
    speed = TierSpeed(0.05, 1e-4, points)
    took = {size: speed.slice_s(size) for size in (0, 500, 1000, 2000, 3000, 4000, 5000, 6000)}
    assert took == pytest.approx(
        {0: 0.05, 500: 0.075, 1000: 0.1, 2000: 0.2, 3000: 0.3, 4000: 0.8, 5000: 1.3, 6000: 1.4}
    )
    # 1 kB per token
    assert load_s(profile(tiers={"disk": speed}), [Load("disk", 2)]) == pytest.approx(0.2)
    # the fitted latency exceeds the measured one
    assert TierSpeed(0.5, 1e-4, points).slice_s(0) == pytest.approx(0.1)


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), max_size=5),
    st.floats(0, 1),
    st.floats(0, 1e-3),
)
def test_a_larger_slice_never_takes_less_time(
    measured: list[tuple[int, float]], latency_s: float, per_byte_s: float
) -> None:
    sizes = sorted({size for size, _ in measured})
    times = sorted(took for _, took in measured)
    speed = TierSpeed(
        latency_s, per_byte_s, tuple(TimedPoint(*at) for at in zip(sizes, times, strict=False))
    )
    took = [
        speed.slice_s(size)
        for size in sorted({0, 1, 500, 10**5, 2 * 10**6, *sizes, *(s + 1 for s in sizes)})
    ]
    assert all(more >= less - 1e-12 for less, more in itertools.pairwise(took))


def test_on_a_gpu_loading_takes_the_longer_of_reading_and_copying() -> None:
    copied = profile(copy_bytes_per_s=500.0)
    assert load_s(copied, [Load("memory", 10)]) == pytest.approx(20.0)
    assert load_s(
        dataclasses.replace(copied, copy_bytes_per_s=1e6), [Load("disk", 10)]
    ) == pytest.approx(10.0)


def test_a_smaller_codec_makes_loading_faster_but_not_the_copy_to_the_device() -> None:
    small = profile(stored_bytes_per_token=1500.0)
    assert load_s(small, [Load("disk", 10)]) == pytest.approx(5.0)
    assert load_s(
        dataclasses.replace(small, copy_bytes_per_s=1e3), [Load("disk", 10)]
    ) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("seconds_a_token", "ttft"), [(0.001, 0.5 + 0.1 + 2 * 1.6), (0.1, 0.5 + 10 + 2 * 10)]
)
def test_ttft_is_the_first_layers_load_plus_the_longer_of_load_and_recompute_per_layer(
    seconds_a_token: float, ttft: float
) -> None:
    tiers = {"disk": disk(seconds_a_token)}
    assert ttft_s(profile(tiers=tiers), COUNTS, 0.5, [Load("disk", 100)]) == pytest.approx(ttft)


def test_entries_recomputed_entirely_are_not_loaded() -> None:
    loads = [Load("disk", 100), Load("disk", 5, fused=False)]
    assert ttft_s(profile(), TokenCounts(100, 10, 115), 1.0, loads) == pytest.approx(
        0.5 + 5 + 2 * 5
    )
    narrowing = TokenCounts(
        100, 10, 115, Selection.NARROWING
    )  # loaded all the same, to be compared
    assert ttft_s(profile(), narrowing, 1.0, loads) == pytest.approx(0.5 + 105 + 2 * 105)


@given(
    profiles,
    shapes,
    ratios,
    st.lists(st.integers(1, 300), max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_ttft_never_falls_with_the_ratio_or_a_slower_tier(
    made: Profile, counts: TokenCounts, ratio: float, tokens: list[int], one: float, other: float
) -> None:
    loads = [Load("disk", count) for count in tokens]
    fast, slow = (
        dataclasses.replace(made, tiers={"disk": disk(at)}, prefill=FREE)
        for at in sorted((one, other))
    )
    assert ttft_s(fast, counts, ratio, loads) <= ttft_s(slow, counts, ratio, loads) + 1e-9
    assert (
        ttft_s(slow, counts, ratio / 2, loads)
        <= ttft_s(slow, counts, min(ratio, 0.99), loads) + 1e-9
    )
    assert (
        ttft_s(slow, counts, ratio, loads)
        <= ttft_s(slow, counts, ratio, [*loads, Load("disk", 1)]) + 1e-9
        or ratio == 1
    )


def test_a_shape_with_more_tokens_than_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="110"):
        TokenCounts(101, 10, 110)
    with pytest.raises(ValueError, match="-1"):
        TokenCounts(-1, 0, 5)
