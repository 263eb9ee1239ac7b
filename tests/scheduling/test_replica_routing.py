"""Routers: hand-computed choices, and properties of any sequence of requests."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.scheduling.replica_routing import (
    ROUTERS,
    ReplicaLoad,
    RoutedPart,
    Router,
    RouterSettings,
    RoutingRequest,
    homes,
    limit,
    make_router,
    rendezvous,
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


def test_least_loaded_ranks_replicas_by_their_number_of_requests() -> None:
    assert make_router("least-loaded").rank(ask(), loaded(a=2, b=0, c=1)) == ["b", "c", "a"]


def test_session_sticky_keeps_a_conversation_on_its_replica_whatever_the_load() -> None:
    router = make_router("session-sticky")
    first = route(router, ask("s"), idle())
    assert route(router, ask("s"), [ReplicaLoad(n, 99 if n == first else 0) for n in NAMES]) == first


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


def test_chunk_aware_weighs_each_request_ahead_as_a_share_of_a_mean_requests_tokens() -> None:
    router = make_router("chunk-aware", RouterSettings(wait_share=0.5, load_factor=10.0))
    router.sent(ask(x=100), "a")  # the mean request has 100 tokens: each ahead costs 50
    others = {"b": 0, "c": 0, "d": 0}
    assert router.rank(ask(x=100), loaded(a=1, **others))[0] == "a"  # 100 - 50 > 0
    assert router.rank(ask(x=100), loaded(a=3, **others))[0] != "a"  # 100 - 150 < 0


def test_chunk_aware_never_exceeds_the_load_limit_for_any_number_of_tokens() -> None:
    router = make_router("chunk-aware", RouterSettings(wait_share=0.0, load_factor=2.0))
    router.sent(ask(x=10_000), "a")
    assert limit(total=3, replicas=4, factor=2.0) == 2
    assert router.rank(ask(x=10_000), loaded(a=1, b=1, c=1, d=0))[0] == "a"
    assert router.rank(ask(x=10_000), loaded(a=2, b=1, c=0, d=0))[0] != "a"


def test_chunk_aware_spreads_a_popular_part_even_when_no_replica_is_loaded() -> None:
    router = make_router("chunk-aware", RouterSettings(share_factor=1.25, window=16))
    went = Counter(route(router, ask(everywhere=1_000), idle()) for _ in range(400))
    assert max(went.values()) <= 1.3 * 400 / 4


def test_chunk_aware_forgets_parts_beyond_what_a_replica_can_hold() -> None:
    router = make_router("chunk-aware", RouterSettings(known_tokens=100))
    key = next(key for key in "pqrstuvw" if "a" not in homes(key, NAMES))
    router.sent(RoutingRequest("", (RoutedPart(key, 60),)), "a")
    assert router.rank(RoutingRequest("", (RoutedPart(key, 60),)), idle())[0] == "a"
    router.sent(ask(other=60), "a")
    assert router.rank(RoutingRequest("", (RoutedPart(key, 60),)), idle())[0] in homes(key, NAMES)


def test_chunk_aware_forgets_the_parts_of_a_removed_replica() -> None:
    router = make_router("chunk-aware")
    key = next(key for key in "pqrstuvw" if "b" not in homes(key, NAMES))
    router.sent(RoutingRequest("", (RoutedPart(key, 60),)), "b")
    router.removed("b")
    assert router.rank(RoutingRequest("", (RoutedPart(key, 60),)), idle())[0] != "b"
    router.removed("never-there")


def test_a_replica_that_leaves_the_rendezvous_moves_only_its_own_keys() -> None:
    for number in range(200):
        order = rendezvous(f"k{number}", NAMES)
        assert rendezvous(f"k{number}", [n for n in NAMES if n != order[2]]) == order[:2] + order[3:]


def test_the_homes_of_keys_are_spread_evenly_over_replicas() -> None:
    went = Counter(name for number in range(4_000) for name in homes(f"k{number}", NAMES))
    assert min(went.values()) > 1_850 and max(went.values()) < 2_150


def test_an_unknown_router_and_a_setting_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk-aware"):
        make_router("chunky")
    for bad in (
        {"load_factor": 0.9},
        {"share_factor": 0.0},
        {"wait_share": -1.0},
        {"wait_share": float("nan")},
        {"window": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            RouterSettings(**bad)  # type: ignore[arg-type]


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
        random = name in ("random", "least-loaded") or (name == "session-sticky" and not request.session)
        if not random:
            assert router.rank(request, replicas) == ranked
        router.sent(request, ranked[0])


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=60),
    factor=st.sampled_from([1.0, 1.25, 2.0]),
)
def test_chunk_aware_keeps_loads_within_the_limit_while_no_request_finishes(
    requests: list[RoutingRequest], factor: float
) -> None:
    router, loads = make_router("chunk-aware", RouterSettings(load_factor=factor)), Counter[str]()
    for served, request in enumerate(requests, 1):
        name = route(router, request, [ReplicaLoad(n, loads[n]) for n in NAMES])
        loads[name] += 1
        assert loads[name] <= ceil(factor * served / len(NAMES))
