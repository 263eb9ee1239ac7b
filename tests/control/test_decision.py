"""The controller: the ratio at the crossing, the cheapest hidden tier, and chunks computed instead
of loaded.
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.control.decision import (
    DELAY,
    Steady,
    belongs_in_memory,
    choose_all,
    choose_computed,
    choose_early,
    choose_ratio,
    choose_tier,
)
from ragkv.control.estimators import MARGIN, load_s, ttft_s
from ragkv.control.profile import LengthFit, Profile, RecomputeFit, TierSpeed
from ragkv.control.token_counts import Load, TokenCounts
from ragkv.fusion import Selection

from .profiles import disk, profile

# a layer takes 1.1 s at ratio 0, 2.1 s at 1
COUNTS = TokenCounts(fused_tokens=100, computed_rows=10, prompt_tokens=110)
LOADS = [Load("disk", 50), Load("disk", 50)]


def on_disk(seconds: float) -> Profile:
    """A profile with which a layer of LOADS takes `seconds` from disk."""
    return profile(tiers={"disk": disk(seconds / 100), "memory": TierSpeed(0.0, 0.0)})


class TestRatio:
    @pytest.mark.parametrize(("seconds", "ratio"), [(1.3, 0.2), (1.6, 0.5), (2.0, 0.9), (2.1, 1.0)])
    def test_the_ratio_is_where_recompute_takes_as_long_as_loading(
        self, seconds: float, ratio: float
    ) -> None:
        made = on_disk(seconds)
        decision = choose_ratio(made, COUNTS, LOADS, 0.15)
        assert decision.ratio == pytest.approx(ratio)
        computing_s = 1.0 + 0.01 * (10 + 100 * decision.ratio)
        assert computing_s == pytest.approx(load_s(made, LOADS))

    def test_the_ratio_accounts_for_placing_and_attention(self) -> None:
        made = dataclasses.replace(
            on_disk(3.0),
            place_token_layer_s=0.002,
            recompute=RecomputeFit(1.0, 0.0, 0.01, 0.0001),
            layers=3,
        )
        crossing_at = (3.0 - 1.0 - 0.2 - 10 * 0.021) / (100 * 0.021)  # .757
        assert choose_ratio(made, COUNTS, LOADS, 0.15).ratio == 0.75 < crossing_at

    @pytest.mark.parametrize(
        ("seconds", "ratio"), [(0.0, 0.15), (1.2, 0.15), (1.25, 0.15), (2.2, 1.0), (50.0, 1.0)]
    )
    def test_the_ratio_is_never_below_r_star_and_never_above_one(
        self, seconds: float, ratio: float
    ) -> None:
        decision = choose_ratio(on_disk(seconds), COUNTS, LOADS, 0.15)
        assert decision.ratio == ratio
        assert ("more would cost time" in decision.reasons[0]) == (ratio < 1)

    def test_the_ratio_is_r_star_if_no_ratio_changes_the_recompute_time(self) -> None:
        assert choose_ratio(on_disk(9.0), TokenCounts(0, 10, 110), LOADS, 0.4).ratio == 0.4

    @pytest.mark.parametrize(("asked", "ratio"), [(1, 0.75), (2, 0.15)])
    def test_an_asking_selector_recomputes_more_while_the_layers_above_the_asked_ones_load(
        self, asked: int, ratio: float
    ) -> None:
        """A layer loads in 2.4 s, asking takes 1.1 s, and recompute 1.1 s + r in each of two
        layers.
        """
        counts = dataclasses.replace(COUNTS, selection=Selection.ASKING, asked_layers=asked)
        assert choose_ratio(on_disk(2.4), counts, LOADS, 0.15).ratio == ratio

    def test_the_ratio_of_a_checking_selector_is_that_of_its_later_layers_and_stays_zero_at_r_star_zero(
        self,
    ) -> None:
        narrowing = dataclasses.replace(COUNTS, selection=Selection.NARROWING)
        deep = dataclasses.replace(on_disk(1.6), layers=21, stored_bytes_per_token=21e3)
        # layer 0 takes 2.1 s, in which more is read
        assert choose_ratio(deep, narrowing, LOADS, 0.15).ratio == pytest.approx(0.45)
        # else all would pass layer 0
        assert choose_ratio(on_disk(1.6), narrowing, LOADS, 0.0).ratio == 0.0
        assert choose_ratio(on_disk(1.6), COUNTS, LOADS, 0.0).ratio == pytest.approx(0.5)


tiers = st.dictionaries(
    st.sampled_from(["memory", "disk"]),
    st.builds(TierSpeed, st.floats(0, 0.5), st.floats(0, 1e-4)),
    min_size=1,
)


class TestTier:
    @given(tiers, st.floats(0, 1))
    def test_the_tier_is_the_lowest_that_does_not_delay_the_first_token(
        self, speeds: dict[str, TierSpeed], ratio: float
    ) -> None:
        made = profile(tiers=speeds)
        first = {
            name: ttft_s(made, COUNTS, ratio, [Load(name, 50), Load(name, 50)]) for name in speeds
        }
        quick = [name for name in speeds if first[name] <= DELAY * min(first.values())]
        # never chosen
        with_shared = dataclasses.replace(made, tiers={**speeds, "redis": TierSpeed(0.0, 0.0)})
        best = choose_tier(with_shared, COUNTS, ratio, LOADS)
        assert best == ("disk" if "disk" in quick else "memory")

    def test_what_reading_takes_of_the_processor_counts_as_delay(self) -> None:
        """Hidden by its time alone, disk delays the first token by its checks."""
        hidden = disk(0.001)
        checked = dataclasses.replace(hidden, hindered_s_per_byte=0.002 / 1000)
        for speed, best in ((hidden, "disk"), (checked, "memory")):
            made = profile(tiers={"disk": speed, "memory": TierSpeed(0.0, 0.0)})
            assert choose_tier(made, COUNTS, 0.15, LOADS) == best

    @pytest.mark.parametrize(
        ("layer_s", "used", "room", "expected"),
        [
            (0.0005, True, True, False),  # disk delays nothing
            (0.002, True, True, True),  # nothing else hides it: memory is the fastest
            (0.002, True, False, True),  # used: it may take the place of others
            (0.002, False, True, True),
            (0.002, False, False, False),  # not used yet: it may not
        ],
    )
    def test_an_entry_belongs_in_memory_if_disk_does_not_hide_its_loading(
        self, layer_s: float, used: bool, room: bool, expected: bool
    ) -> None:
        """A row takes 10 ms, so at r* = .15 a token hides 1.5 ms of loading, and the question some
        more.
        """
        speeds = {"disk": disk(layer_s), "memory": TierSpeed(0.0, 0.0)}
        made = profile(
            tiers=speeds,
            recompute=RecomputeFit(0.0, 0.0, 0.01, 0.0),
            layers=30,
            stored_bytes_per_token=30e3,
        )
        like = TokenCounts(0, 0, 0)
        found = belongs_in_memory(made, 128, like, 0.15, used, room)
        assert found is expected


def test_a_steady_number_ignores_small_changes_and_follows_large_ones_in_steps() -> None:
    steady = Steady()
    assert [steady.of("disk", latest) for latest in (1.05, 0.9, 1.18, 1.2, 1.05, 0.95)] == [
        pytest.approx(number) for number in (1.0, 1.0, 1.0, 2**0.25, 2**0.25, 1.0)
    ]
    assert steady.of("redis", 4.1) == pytest.approx(4.0)  # names count apart


chunk = st.builds(
    Load, st.sampled_from(["memory", "disk", "redis"]), st.integers(1, 60), st.booleans()
)


class TestComputedInstead:
    @settings(max_examples=200)
    @given(
        st.lists(chunk, max_size=6),
        st.floats(0, 0.03),
        st.floats(0, 0.1),
        st.floats(0, 0.99),
        st.integers(0, 30),
    )
    def test_the_computed_chunks_are_the_slowest_of_those_that_load_slower_than_they_compute_as_many_as_pay(
        self, loads: list[Load], of_disk: float, of_remote: float, ratio: float, question: int
    ) -> None:
        speeds = {
            "memory": TierSpeed(0.0, 0.0),
            "disk": disk(of_disk),
            "redis": disk(of_remote, latency_s=0.2),
        }
        made = profile(tiers=speeds)
        fused = sum(load.tokens for load in loads if load.fused)
        counts = TokenCounts(fused, question, question + sum(load.tokens for load in loads))
        slow = [i for i, load in enumerate(loads) if load_s(made, [load]) > load.tokens * 0.01]
        slow.sort(key=lambda i: -load_s(made, [loads[i]]) / loads[i].tokens)
        best = min(
            self.ttft(made, counts, loads, ratio, tuple(slow[:count]))
            for count in range(len(slow) + 1)
        )
        decision = choose_computed(made, counts, loads, ratio)
        assert set(decision.computed_loads) == set(slow[: len(decision.computed_loads)])
        assert decision.ttft_s == pytest.approx(best)
        assert decision.ttft_s == pytest.approx(
            self.ttft(made, counts, loads, ratio, decision.computed_loads)
        )

    @staticmethod
    def ttft(
        made: Profile,
        counts: TokenCounts,
        loads: list[Load],
        ratio: float,
        computed: tuple[int, ...],
    ) -> float:
        """TTFT computed independently of the estimators."""
        kept = [load for i, load in enumerate(loads) if i not in computed]
        misses = sum(loads[i].tokens for i in computed)
        rows = (
            counts.computed_rows + misses + ratio * sum(load.tokens for load in kept if load.fused)
        )
        loading = load_s(made, kept)
        return made.start_s + loading + 2 * max(loading, 1.0 + 0.01 * rows)

    @pytest.mark.parametrize(("token_s", "computed"), [(0.0, ()), (0.001, ()), (0.004, (0, 1))])
    def test_the_chunks_at_the_front_are_computed_while_the_question_waits_to_ask(
        self, token_s: float, computed: tuple[int, ...]
    ) -> None:
        """A row takes 10 ms, so no chunk computes quicker than it loads. The question's 10 rows
        take .1 s a layer, in which 100 tokens load at 1 ms each, but not at 4 ms.
        """
        made = profile(tiers={"disk": disk(token_s)}, recompute=RecomputeFit(0.0, 0.0, 0.01, 0.0))
        counts = dataclasses.replace(COUNTS, selection=Selection.ASKING, asked_layers=2)
        loads = [Load("disk", 10)] * 10
        decision = choose_computed(made, counts, loads, 0.15)
        assert decision.computed_loads == computed
        rows = 10 * len(computed)  # exact, so they are not computed again
        rest = dataclasses.replace(
            counts, fused_tokens=100 - rows, computed_rows=10 + rows, leading_rows=rows
        )
        assert decision.ttft_s == ttft_s(made, rest, 0.15, loads[len(computed) :])

    def test_a_fixed_load_is_never_computed(self) -> None:
        made = profile(tiers={"disk": disk(1.0)})
        loads = [Load("disk", 50, fused=False, fixed=True), Load("disk", 50)]
        assert choose_computed(made, TokenCounts(50, 10, 110), loads, 0.15).computed_loads == (1,)

    def test_a_chunk_that_ends_the_prompt_may_be_computed_although_its_last_token_is_forced(
        self,
    ) -> None:
        """Without a question the last token of the last chunk is computed, so it is not among the
        fused tokens.
        """
        made = profile(tiers={"disk": disk(1.0)})
        assert choose_computed(
            made, TokenCounts(99, 1, 100), [Load("disk", 100)], 0.15
        ).computed_loads == (0,)


class TestEarly:
    """Of 20 layers the question asks over 10. Asking takes 1.1 s a layer, an early token 10 ms."""

    COUNTS = dataclasses.replace(COUNTS, selection=Selection.ASKING, asked_layers=10)

    @staticmethod
    def disk(seconds: float) -> Profile:
        """With which a layer of LOADS takes so long from disk."""
        return dataclasses.replace(on_disk(seconds), layers=21, stored_bytes_per_token=21e3)

    @pytest.mark.parametrize(
        ("seconds", "early"), [(0.0, 0), (1.1, 0), (1.12, 5), (1.28, 15), (1.4, 15), (3.0, 85)]
    )
    def test_tokens_are_recomputed_while_the_question_waits_if_the_first_token_is_hardly_later(
        self, seconds: float, early: int
    ) -> None:
        """A step of 5 tokens takes .5 s in the upper layers, and 5 % of the time is 2 s. If loading
        takes longer than all work, the upper layers wait, too.
        """
        made = self.disk(seconds)
        decision = choose_early(made, self.COUNTS, LOADS, 0.15)
        assert decision.early == early
        assert bool(decision.reasons) == bool(early)
        at_once_s = ttft_s(made, self.COUNTS, 0.15, LOADS)
        assert at_once_s <= decision.ttft_s <= at_once_s * DELAY

    def test_none_are_where_nothing_is_asked_or_all_is_chosen(self) -> None:
        made = self.disk(1.5)
        assert choose_early(made, COUNTS, LOADS, 0.15).early == 0
        assert choose_early(made, self.COUNTS, LOADS, 0.0).early == 0
        assert choose_early(made, self.COUNTS, LOADS, 1.0).early == 0
        assert choose_early(made, self.COUNTS, LOADS, 0.97).early == 0

    def test_the_decision_of_a_request_has_them(self) -> None:
        """A row takes 20 ms, so no chunk loads slower than it is computed."""
        made = dataclasses.replace(
            self.disk(1.28),
            prefill=LengthFit(100.0, 0.03, 0.0),
            recompute=RecomputeFit(0.0, 0.0, 0.02, 0.0),
        )
        decision = choose_all(made, self.COUNTS, LOADS, 0.15)
        assert decision == dataclasses.replace(
            choose_early(made, self.COUNTS, LOADS, decision.ratio), reasons=decision.reasons
        )
        assert decision.early > 0
        assert len(decision.reasons) == 2


class TestDecide:
    def test_decide_computes_the_slow_chunks_then_raises_the_ratio_for_the_others(self) -> None:
        made = profile(
            tiers={"disk": disk(0.016), "redis": disk(1.0), "memory": TierSpeed(0.0, 0.0)}
        )
        slow_prefill = LengthFit(100.0, 0.03, 0.0)  # fusing pays
        made = dataclasses.replace(
            made, recompute=RecomputeFit(0.0, 0.0, 0.02, 0.0), prefill=slow_prefill
        )
        loads = [Load("disk", 100), Load("redis", 20)]
        decision = choose_all(made, TokenCounts(120, 10, 130), loads, 0.15)
        assert decision.computed_loads == (1,)
        assert decision.ratio == pytest.approx((1.6 - 0.02 * 30) / 2.0)
        assert len(decision.reasons) == 2
        assert decision.ttft_s <= ttft_s(made, TokenCounts(120, 10, 130), 0.15, loads)

    @given(
        st.lists(chunk, max_size=5),
        st.floats(0, 0.03),
        st.floats(0, 0.1),
        st.floats(0, 1),
        st.sampled_from(Selection),
    )
    def test_a_decision_takes_no_longer_than_loading_all_at_r_star_but_for_the_margin_of_exactness(
        self,
        loads: list[Load],
        of_disk: float,
        of_remote: float,
        r_star: float,
        selection: Selection,
    ) -> None:
        made = profile(
            tiers={"memory": TierSpeed(0.0, 0.0), "disk": disk(of_disk), "redis": disk(of_remote)}
        )
        fused = sum(load.tokens for load in loads if load.fused)
        counts = TokenCounts(fused, 5, 5 + sum(load.tokens for load in loads), selection)
        decision = choose_all(made, counts, loads, r_star)
        assert decision.ttft_s <= ttft_s(made, counts, r_star, loads) * MARGIN * DELAY * (1 + 1e-9)
        assert r_star <= decision.ratio <= 1

    def test_without_loads_the_decision_is_r_star(self) -> None:
        decision = choose_all(profile(), TokenCounts(0, 10, 10), [], 0.15)
        assert (decision.ratio, decision.computed_loads) == (0.15, ())
