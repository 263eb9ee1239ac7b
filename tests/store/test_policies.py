"""The contract of every policy, and what single policies learn."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate import ALL_POLICIES, SIMULATOR_ONLY, TraceSettings, make_any_policy
from ragkv.config import EngineConfig, StoreConfig
from ragkv.errors import ConfigError
from ragkv.store.opening import open_store
from ragkv.store.policies import Policy, PolicySettings, TurnSize, make_policy
from ragkv.store.policies.t_lru import RECENT_GAPS, Departed, ReturnGaps

NAMES = sorted(ALL_POLICIES)


def turn(group: str, at: float, length: int, prompt: int = 1, number: int = 1) -> TurnSize:
    """A served turn whose future is unknown."""
    return TurnSize(at, int(at), group, prompt, 0, length, number, None if number == 1 else 1.0)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_any_policy(request.param)


class TestEveryPolicy:
    def test_naming_a_victim_twice_gives_the_same_victim(self, policy: Policy) -> None:
        for number, group in enumerate("abc"):
            policy.held(group, 1, 1, float(number))
        assert policy.victim(set(), 3.0) == policy.victim(set(), 3.0)

    @pytest.mark.parametrize("name", NAMES)
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["serve", "hold", "use", "shrink", "evict", "queue", "start"]),
                st.sampled_from("abcdef"),
                st.integers(0, 9),
            )
        ),
        leased=st.sets(st.sampled_from("abcdef")),
        xi=st.integers(0, 6),
    )
    def test_a_policy_names_a_cut_that_frees_something_while_a_group_is_not_leased(
        self, name: str, steps: list[tuple[str, str, int]], leased: set[str], xi: int
    ) -> None:
        policy = make_any_policy(name, PolicySettings(xi_blocks=xi))
        held = dict[str, int]()
        queue = list[tuple[str, int]]()
        for now, (step, group, number) in enumerate(steps):
            if step == "serve":
                policy.turn_prefilled(turn(group, float(now), number, number=1 + number % 3))
            elif step == "hold":
                held[group] = number
                policy.held(group, number, number, float(now))
            elif step == "use":
                policy.used(group, float(now))
            elif step == "shrink":
                held[group] = min(held.get(group, 0), number)
                policy.held(group, held[group], held[group], float(now))
            elif step == "queue":
                policy.queued(group, now)
                queue.append((group, now))
            elif step == "start" and queue:
                policy.left(*queue.pop(0))
            elif step == "evict":
                eviction = policy.victim(leased, float(now))
                there = {other for other, blocks in held.items() if blocks} - leased
                assert (eviction is None) == (not there)
                if eviction is not None:
                    assert eviction.group in there and 0 <= eviction.keep < held[eviction.group]
                    held[eviction.group] = eviction.keep
                    policy.held(eviction.group, eviction.keep, eviction.keep, float(now))


def test_an_unknown_policy_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lfu'.*lru"):
        make_policy("lfu")
    with pytest.raises(ConfigError, match=r"'lfu'.*belady.*lru"):
        make_any_policy("lfu")


def test_a_policy_that_needs_the_future_is_refused_outside_the_simulator() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'belady'.*lru.*benchmarks.simulate"):
        make_policy("belady")


@pytest.mark.parametrize("name", sorted(SIMULATOR_ONLY))
def test_store_settings_refuse_a_policy_of_the_simulator_and_name_the_others(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'; it must be one of: .*lookahead"):
        StoreConfig(policy=name)


@pytest.mark.parametrize("setting", ["xi_blocks", "new_blocks"])
def test_negative_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is -1"):
        make_policy("lru", PolicySettings(**{setting: -1}))


def test_a_store_converts_the_token_threshold_of_its_policies_to_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[PolicySettings | None] = []

    def make(name: str, settings: PolicySettings | None = None) -> Policy:
        given.append(settings)
        return make_policy(name, settings)

    monkeypatch.setattr("ragkv.store.opening.make_policy", make)
    open_store(
        StoreConfig(policy="t-lru", xi_tokens=1000, memory_bytes=10**6), block_tokens=64
    ).close()
    assert given == [PolicySettings(xi_blocks=15, block_tokens=64)]


@pytest.mark.parametrize("name", ["t-lru", "et-lru", "t-lru-guarded"])
def test_a_new_threshold_counts_from_the_next_turn_on(name: str) -> None:
    """What a policy evicts after `retarget` is what one with that threshold from the beginning
    evicts.
    """
    settings = TraceSettings(xi_blocks=1, new_blocks=1, new_blocks_seen=(1,))
    changed = make_any_policy(name, settings)
    other = make_any_policy(name, replace(settings, xi_blocks=5))
    changed.retarget(5)
    for number in range(40):
        group = "abc"[number % 3]
        for policy in (changed, other):
            policy.turn_prefilled(turn(group, float(number), 6))
            policy.held(group, 6, 6, float(number))
        assert changed.victim((), number + 0.5) == other.victim((), number + 0.5)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (dict(policy="t-lru"), "needs store.ttft_target_ms"),
        (dict(ttft_target_ms=200.0, xi_tokens=1), "takes the place of"),
        (dict(ttft_target_ms=0.0), "more than 0"),
        (dict(policy="t-lru", xi_tokens=255), "less than session.block_tokens"),
    ],
)
def test_a_threshold_without_effect_is_refused(store: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(store=StoreConfig(**store))


class TestLearning:
    def test_return_gaps_forget_the_oldest_gaps(self) -> None:
        gaps = ReturnGaps()
        for gap in [100.0] * RECENT_GAPS + [1.0] * RECENT_GAPS:
            gaps.add(gap)
        assert gaps.quantile(0.99) == 1.0

    def test_departed_forgets_the_groups_that_left_first_beyond_its_bound(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragkv.store.policies.t_lru.MOST_DEPARTED", 3)
        forgotten: list[str] = []
        departed = Departed(forgotten.append)
        for group in "abcad":
            departed.add(group)
        departed.discard("c")
        departed.add("e")
        departed.add("f")
        assert forgotten == ["b", "a"]
