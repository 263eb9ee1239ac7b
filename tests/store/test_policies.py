"""What every policy must hold: one contract, run over all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.store import LRU, POLICIES, Item, Policy, make_policy


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param)


class TestEveryPolicy:
    def test_names_no_victim_when_it_holds_nothing(self, policy: Policy) -> None:
        assert policy.victim(set(), 0.0) is None

    def test_names_only_what_it_holds_and_is_not_pinned(self, policy: Policy) -> None:
        for number, key in enumerate("abc"):
            policy.inserted(Item(key, 1), float(number))
        policy.removed("a")
        assert policy.victim({"b"}, 3.0) == "c"
        assert policy.victim({"b", "c"}, 3.0) is None

    def test_naming_a_victim_changes_nothing(self, policy: Policy) -> None:
        for number, key in enumerate("abc"):
            policy.inserted(Item(key, 1), float(number))
        assert policy.victim(set(), 3.0) == policy.victim(set(), 3.0)

    def test_ignores_keys_it_does_not_know(self, policy: Policy) -> None:
        policy.used("x", 0.0)
        policy.removed("x")
        assert policy.victim(set(), 0.0) is None

    def test_a_key_may_come_back(self, policy: Policy) -> None:
        policy.inserted(Item("a", 1), 0.0)
        policy.removed("a")
        policy.inserted(Item("a", 2), 1.0)
        assert policy.victim(set(), 2.0) == "a"

    @pytest.mark.parametrize("name", sorted(POLICIES))
    @given(
        steps=st.lists(st.tuples(st.sampled_from(["insert", "use", "remove", "evict"]), st.sampled_from("abcdef"))),
        pinned=st.sets(st.sampled_from("abcdef")),
    )
    def test_always_finds_a_victim_while_one_is_unpinned(
        self, name: str, steps: list[tuple[str, str]], pinned: set[str]
    ) -> None:
        policy, held = make_policy(name), set[str]()
        for now, (step, key) in enumerate(steps):
            if step == "insert" and key not in held:
                policy.inserted(Item(key, 1), float(now))
                held.add(key)
            elif step == "use":
                policy.used(key, float(now))
            elif step == "remove":
                policy.removed(key)
                held.discard(key)
            elif step == "evict":
                victim = policy.victim(pinned, float(now))
                assert (victim in held - pinned) if held - pinned else victim is None
                if victim is not None:
                    policy.removed(victim)
                    held.discard(victim)


def test_lru_evicts_what_was_not_used_for_longest() -> None:
    policy = LRU()
    for key in "abc":
        policy.inserted(Item(key, 1), 0.0)
    policy.used("a", 1.0)
    assert policy.victim(set(), 2.0) == "b"


def test_an_unknown_policy_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'lfu'.*lru"):
        make_policy("lfu")
