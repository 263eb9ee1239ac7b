"""What every policy must hold: one contract, run over all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.config import StoreConfig
from ragkv.errors import ConfigError
from ragkv.simulate import ALL_POLICIES, SIMULATOR_ONLY, make_any_policy
from ragkv.store import LRU, Policy, Store, make_policy
from ragkv.store.policies import Cut, PolicySettings, Turn
from ragkv.store.policies.conversation_model import RECENT_GAPS, ReturnGaps, ReturnPredictor
from ragkv.store.policies.departed import Departed

NAMES = sorted(ALL_POLICIES)


def turn(group: str, at: float, length: int, prompt: int = 1, number: int = 1) -> Turn:
    """A served turn whose future nobody knows."""
    return Turn(at, int(at), group, prompt, 0, length, number, None if number == 1 else 1.0)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_any_policy(request.param)


class TestEveryPolicy:
    def test_names_no_victim_when_it_holds_nothing(self, policy: Policy) -> None:
        assert policy.victim(set(), 0.0) is None

    def test_names_only_what_it_holds_and_is_not_pinned(self, policy: Policy) -> None:
        for number, group in enumerate("abc"):
            policy.held(group, 1, 1, float(number))
        policy.held("a", 0, 0, 3.0)
        cut = policy.victim({"b"}, 3.0)
        assert cut is not None and (cut.group, cut.keep) == ("c", 0)
        assert policy.victim({"b", "c"}, 3.0) is None

    def test_naming_a_victim_changes_nothing(self, policy: Policy) -> None:
        for number, group in enumerate("abc"):
            policy.held(group, 1, 1, float(number))
        assert policy.victim(set(), 3.0) == policy.victim(set(), 3.0)

    def test_ignores_groups_it_does_not_know(self, policy: Policy) -> None:
        policy.used("x", 0.0)
        policy.held("x", 0, 0, 0.0)
        assert policy.victim(set(), 0.0) is None

    def test_a_group_may_come_back(self, policy: Policy) -> None:
        policy.held("a", 1, 1, 0.0)
        policy.held("a", 0, 0, 0.0)
        policy.held("a", 1, 2, 1.0)
        cut = policy.victim(set(), 2.0)
        assert cut is not None and cut.group == "a"

    @pytest.mark.parametrize("name", NAMES)
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["serve", "hold", "use", "shrink", "evict", "queue", "start"]),
                st.sampled_from("abcdef"),
                st.integers(0, 9),
            )
        ),
        pinned=st.sets(st.sampled_from("abcdef")),
        xi=st.integers(0, 6),
    )
    def test_always_names_a_cut_that_frees_something_while_a_group_is_unpinned(
        self, name: str, steps: list[tuple[str, str, int]], pinned: set[str], xi: int
    ) -> None:
        policy, held, queue = (
            make_any_policy(name, PolicySettings(xi_blocks=xi)),
            dict[str, int](),
            list[str](),
        )
        for now, (step, group, number) in enumerate(steps):
            if step == "serve":
                policy.served(turn(group, float(now), number, number=1 + number % 3))
            elif step == "hold":
                held[group] = number
                policy.held(group, number, number, float(now))
            elif step == "use":
                policy.used(group, float(now))
            elif step == "shrink":
                held[group] = min(held.get(group, 0), number)
                policy.held(group, held[group], held[group], float(now))
            elif step == "queue":
                policy.queued(group)
                queue.append(group)
            elif step == "start" and queue:
                policy.started(queue.pop(0))
            elif step == "evict":
                cut = policy.victim(pinned, float(now))
                there = {other for other, blocks in held.items() if blocks} - pinned
                assert (cut is None) == (not there)
                if cut is not None:
                    assert cut.group in there and 0 <= cut.keep < held[cut.group]
                    held[cut.group] = cut.keep
                    policy.held(cut.group, cut.keep, cut.keep, float(now))


def test_lru_evicts_what_was_not_used_for_longest() -> None:
    policy = LRU()
    for group in "abc":
        policy.held(group, 1, 1, 0.0)
    policy.used("a", 1.0)
    cut = policy.victim(set(), 2.0)
    assert cut is not None and cut.group == "b"


def test_an_unknown_policy_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lfu'.*lru"):
        make_policy("lfu")
    with pytest.raises(ConfigError, match=r"'lfu'.*belady.*lru"):
        make_any_policy("lfu")


def test_a_policy_that_needs_the_future_is_refused_outside_the_simulator() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'belady'.*lru.*ragkv simulate"):
        make_policy("belady")


@pytest.mark.parametrize("name", sorted(SIMULATOR_ONLY))
def test_store_settings_refuse_a_policy_of_the_simulator_and_say_where_it_runs(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}', which runs only in the simulator \(`ragkv simulate.*lookahead"):
        StoreConfig(policy=name)


@pytest.mark.parametrize("setting", ["xi_blocks", "new_blocks", "capacity_blocks", "window_groups"])
def test_negative_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is -1"):
        PolicySettings(**{setting: -1})


def test_a_store_gives_its_policies_the_threshold_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[PolicySettings | None] = []

    def make(name: str, settings: PolicySettings | None = None) -> Policy:
        given.append(settings)
        return make_policy(name, settings)

    monkeypatch.setattr("ragkv.store.store.make_policy", make)
    Store.open(StoreConfig(policy="t-lru", xi_tokens=1000, memory_bytes=10**6), block_tokens=64).close()
    assert given == [PolicySettings(xi_blocks=15, block_tokens=64, window_bytes=10**6)]


class TestLearning:
    def test_a_conversation_idle_beyond_every_gap_will_hardly_return(self) -> None:
        returns = ReturnPredictor()
        for number in range(100):
            returns.learn(turn("a", 10.0 * number, 1, number=1))
            returns.learn(turn("a", 10.0 * number + 1, 1, number=2))
        assert returns.chance(1, 0.0, 0.5) > 0.9 > 0.05 > returns.chance(1, 0.0, 2.0)

    def test_gaps_of_long_ago_are_forgotten(self) -> None:
        gaps = ReturnGaps()
        for gap in [100.0] * RECENT_GAPS + [1.0] * RECENT_GAPS:
            gaps.add(gap)
        assert (len(gaps), gaps.quantile(0.99), gaps.survival(50.0)) == (RECENT_GAPS, 1.0, 0.0)

    def test_end_aware_lets_the_doubtful_go_first_when_live(self) -> None:
        policy = make_policy("end-aware", PolicySettings(xi_blocks=5, new_blocks=1))
        for number in range(50):
            policy.served(turn(f"x{number}", number, 10, number=1))
            policy.served(turn(f"x{number}", number, 10, number=2))
        policy.served(turn("gone", 100.0, 10))
        policy.held("gone", 10, 10, 100.0)
        policy.served(turn("here", 199.5, 10))
        policy.held("here", 10, 10, 199.5)
        assert policy.victim((), 200.0) == Cut("gone")  # whole, before anybody is trimmed

    def test_auto_follows_lru_until_trimming_has_shown_better(self) -> None:
        auto, lru = make_policy("auto", PolicySettings(xi_blocks=4, capacity_blocks=10)), make_policy("lru")
        for policy in (auto, lru):
            for number, group in enumerate("abc"):
                policy.served(turn(group, float(number), 4))
                policy.held(group, 4, 4, float(number))
        assert auto.victim((), 3.0) == lru.victim((), 3.0)

    def test_what_is_known_of_a_conversation_outlives_its_blocks_but_not_for_ever(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragkv.store.policies.departed.MOST", 3)
        forgotten: list[str] = []
        departed = Departed(forgotten.append)
        for group in "abcad":
            departed.add(group)
        departed.discard("c")
        departed.add("e")
        departed.add("f")
        assert forgotten == ["b", "a"]
