"""Routers: hand-computed choices, and properties of any sequence of requests."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.integrations.ray.replica_routing import (
    LOAD_FACTOR,
    ROUTERS,
    ReplicaLoad,
    RoutedPart,
    Router,
    RoutingRequest,
    homes,
    limit,
    make_router,
)

NAMES = ("a", "b", "c", "d")


def idle(*names: str) -> list[ReplicaLoad]:
    return [ReplicaLoad(name) for name in names or NAMES]


def loaded(**loads: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(name, load) for name, load in loads.items()]


def ask(session: str = "", **parts: int) -> RoutingRequest:
    return RoutingRequest(session, tuple(RoutedPart(key, tokens) for key, tokens in parts.items()))


def route(router: Router, request: RoutingRequest, replicas: list[ReplicaLoad]) -> str:
    name = router.rank(request, replicas)[0]
    router.sent(request, name)
    return name


def test_round_robin_sends_to_one_replica_after_another() -> None:
    router = make_router("round-robin")
    assert [route(router, ask(), idle("a", "b", "c")) for _ in range(4)] == ["a", "b", "c", "a"]


def test_chunk_aware_chooses_the_replica_that_was_sent_most_of_the_tokens() -> None:
    router = make_router("chunk-aware")
    router.sent(ask(x=100), "a")
    router.sent(ask(y=150, z=10), "b")
    assert router.rank(ask(x=100, y=150), idle())[0] == "b"
    assert router.rank(ask(x=100, z=10), idle())[0] == "a"


def test_chunk_aware_sends_a_new_part_to_the_less_used_of_its_two_homes() -> None:
    for key in "pqrstuvw":
        router, first_two = make_router("chunk-aware"), homes(key, NAMES)
        assert router.rank(RoutingRequest("", (RoutedPart(key, 10),)), idle())[0] in first_two
        router.sent(ask(), first_two[0])
        assert router.rank(RoutingRequest("", (RoutedPart(key, 10),)), idle())[0] == first_two[1]


def test_chunk_aware_weighs_each_request_ahead_as_a_mean_requests_tokens() -> None:
    router = make_router("chunk-aware")
    router.sent(ask(x=100), "a")
    router.sent(ask(), "b")  # the mean request has 50 tokens: each ahead costs 50
    assert router.rank(ask(x=100), loaded(a=2, b=1, c=1, d=1))[0] == "a"  # 100 - 2 x 50 > -50
    assert router.rank(ask(x=100), loaded(a=3, b=0, c=2, d=2))[0] == "b"  # 100 - 3 x 50 < 0


def test_chunk_aware_never_exceeds_the_load_limit_for_any_number_of_tokens() -> None:
    router = make_router("chunk-aware")
    router.sent(ask(x=10_000), "a")
    for _ in range(9):
        router.sent(ask(), "b")  # so a mean request is short, and waiting costs little
    assert limit(total=3, replicas=4, factor=2.0) == 2
    assert router.rank(ask(x=10_000), loaded(a=1, b=1, c=1, d=0))[0] == "a"
    assert router.rank(ask(x=10_000), loaded(a=2, b=1, c=0, d=0))[0] != "a"


def test_chunk_aware_spreads_a_popular_part_even_when_no_replica_is_loaded() -> None:
    router = make_router("chunk-aware")
    went = Counter(route(router, ask(everywhere=1_000), idle()) for _ in range(1_600))
    assert max(went.values()) <= 1.3 * 1_600 / 4


def test_chunk_aware_forgets_the_parts_of_a_removed_replica() -> None:
    router = make_router("chunk-aware")
    key = next(key for key in "pqrstuvw" if "b" not in homes(key, NAMES))
    router.sent(RoutingRequest("", (RoutedPart(key, 60),)), "b")
    router.removed("b")
    assert router.rank(RoutingRequest("", (RoutedPart(key, 60),)), idle())[0] != "b"
    router.removed("never-there")


def test_a_replica_that_leaves_moves_only_its_own_keys() -> None:
    for number in range(200):
        kept = homes(f"k{number}", NAMES)
        others = [name for name in NAMES if name not in kept]
        assert homes(f"k{number}", (*kept, others[0])) == kept


def test_the_homes_of_keys_are_spread_evenly_over_replicas() -> None:
    went = Counter(name for number in range(4_000) for name in homes(f"k{number}", NAMES))
    assert min(went.values()) > 1_850 and max(went.values()) < 2_150


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunk-aware"):
        make_router("chunky")


REQUESTS = st.builds(
    RoutingRequest,
    st.sampled_from(["", "s", "t"]),
    st.lists(st.builds(RoutedPart, st.sampled_from("uvwxyz"), st.integers(0, 900)), max_size=5).map(tuple),
)


@given(
    name=st.sampled_from(sorted(ROUTERS)),
    requests=st.lists(st.tuples(REQUESTS, st.lists(st.integers(0, 9), min_size=3, max_size=3)), max_size=30),
    leaves=st.integers(0, 30),
)
def test_every_router_ranks_each_replica_once_and_ranking_twice_changes_nothing(
    name: str, requests: list[tuple[RoutingRequest, list[int]]], leaves: int
) -> None:
    router = make_router(name)
    for number, (request, loads) in enumerate(requests):
        names = NAMES[:3] if number < leaves else NAMES[1:]
        if number == leaves:
            router.removed("a")
        replicas = [ReplicaLoad(n, load) for n, load in zip(names, loads, strict=True)]
        ranked = router.rank(request, replicas)
        assert sorted(ranked) == sorted(names)
        assert router.rank(request, replicas) == ranked
        router.sent(request, ranked[0])


@given(requests=st.lists(REQUESTS, min_size=1, max_size=60))
def test_chunk_aware_keeps_loads_within_the_limit_while_no_request_finishes(requests: list[RoutingRequest]) -> None:
    router, loads = make_router("chunk-aware"), Counter[str]()
    for served, request in enumerate(requests, 1):
        name = route(router, request, [ReplicaLoad(n, loads[n]) for n in NAMES])
        loads[name] += 1
        assert loads[name] <= ceil(LOAD_FACTOR * served / len(NAMES))
