"""Routers: what shares parts goes to one replica, load is bounded, and few parts move when a replica leaves."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.integrations.ray.replica_routing import LOAD_FACTOR, ROUTERS, Parts, RoutedPart, home, limit, make_router

NAMES = ("a", "b", "c", "d")
IDLE = dict.fromkeys(NAMES, 0)


def parts(**tokens: int) -> Parts:
    return tuple(RoutedPart(key, count) for key, count in tokens.items())


def test_round_robin_sends_to_one_replica_after_another() -> None:
    rank = make_router("round-robin")
    assert [rank((), dict(a=0, b=0, c=0))[0] for _ in range(4)] == ["a", "b", "c", "a"]


def test_chunk_aware_chooses_the_home_of_most_of_the_tokens() -> None:
    rank = make_router("chunk-aware")
    x = next(key for key in "pqrstuvw" if home(key, NAMES) == "a")
    y, z = [key for key in map(str, range(99)) if home(key, NAMES) == "b"][:2]
    assert rank(parts(**{x: 100, y: 60, z: 60}), IDLE)[0] == "b"
    assert rank(parts(**{x: 100, y: 60}), IDLE)[0] == "a"


def test_chunk_aware_never_exceeds_the_load_limit_for_any_number_of_tokens() -> None:
    rank, own = make_router("chunk-aware"), home("x", NAMES)
    ones = dict.fromkeys(NAMES, 1)
    assert limit(total=4, replicas=4) == limit(total=2, replicas=2) == 2
    assert rank(parts(x=10_000), ones)[0] == own
    assert rank(parts(x=10_000), {**ones, own: 9})[0] != own


def test_a_request_of_which_nothing_is_known_goes_to_the_least_loaded_replica() -> None:
    assert make_router("chunk-aware")((), dict(a=2, b=1, c=3)) == ["b", "a", "c"]


def test_a_replica_that_leaves_moves_only_its_own_keys() -> None:
    for number in range(200):
        kept = home(f"k{number}", NAMES)
        others = tuple(name for name in NAMES if name == kept or name != NAMES[number % 4])
        assert home(f"k{number}", others) == kept


def test_the_homes_of_keys_are_spread_evenly_over_replicas() -> None:
    went = Counter(home(f"k{number}", NAMES) for number in range(4_000))
    assert min(went.values()) > 900 and max(went.values()) < 1_100


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunk-aware"):
        make_router("chunky")


PARTS = st.lists(st.builds(RoutedPart, st.sampled_from("uvwxyz"), st.integers(0, 900)), max_size=5).map(tuple)


@given(name=st.sampled_from(sorted(ROUTERS)), parts=PARTS, loads=st.lists(st.integers(0, 9), max_size=4))
def test_every_router_ranks_each_replica_once(name: str, parts: Parts, loads: list[int]) -> None:
    replicas = dict(zip(NAMES, loads, strict=False))
    assert sorted(make_router(name)(parts, replicas)) == sorted(replicas)


@given(requests=st.lists(PARTS, min_size=1, max_size=60))
def test_chunk_aware_keeps_loads_within_the_limit_while_no_request_finishes(requests: list[Parts]) -> None:
    rank, loads = make_router("chunk-aware"), dict(IDLE)
    for served, request in enumerate(requests, 1):
        name = rank(request, loads)[0]
        loads[name] += 1
        assert loads[name] <= ceil(LOAD_FACTOR * served / len(NAMES))
