"""Replicas behind a router: hand-computed cases, invariants, and one replica against the plain replay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.lab.simulate import (
    ALL_POLICIES,
    RagLoad,
    RagRequest,
    ReplicaSetup,
    TokenTimes,
    Trace,
    TurnLoad,
    make_any_policy,
    poisson,
    policy_for,
    replay,
    serve_replicas,
)
from ragkv.lab.simulate.chunks import position_free, replay_chunks
from ragkv.lab.simulate.cluster import route
from ragkv.lab.simulate.readers.ragpulse import PromptPart
from ragkv.lab.simulate.run import ReplaySetting
from ragkv.scheduling.replica_routing import ROUTERS, RouterSettings

from .reference import random_rows

UNIT = TokenTimes(token_ms=1.0)  # a second for 1,000 computed tokens, nothing for found tokens
ONLINE = sorted(name for name, policy in ALL_POLICIES.items() if not policy.needs_future and name != "lookahead")


def request(at: float, *passages: int, session: str = "s", question: int = 0) -> RagRequest:
    parts = [PromptPart("passages_ids", n, 1_000) for n in passages]
    if question:
        parts.append(PromptPart("user_input", 0, question))
    return RagRequest(at, session, tuple(parts), 0)


def test_round_robin_over_two_replicas_gives_the_hand_computed_hits_and_times() -> None:
    #      r0: 1, computed          r1: 1, computed          r0: 1 and 2, half found
    load = RagLoad([request(0, 1), request(0, 1), request(0.5, 1, 2)])
    done = route(load, ReplicaSetup(2, 9_000, router="round-robin", profile=UNIT))
    assert done.replica == [0, 1, 0]
    assert [tuple(f) for f in done.found] == [(0, 0, 0, 1_000, 0), (0, 0, 0, 1_000, 0), (1_000, 0, 0, 1_000, 0)]
    assert done.wait_ms.tolist() == [0, 0, 500]  # r0 is free at 1 s
    assert done.ttft_ms.tolist() == [1_000, 1_000, 1_500]


def test_the_shared_tier_has_an_entry_once_the_prefill_that_made_it_has_ended() -> None:
    load = RagLoad([request(0, 1), request(0.5, 1), request(1.0, 2), request(1.5, 1), request(2.5, 2)])
    profile = TokenTimes(token_ms=1.0, remote_token_ms=0.1)
    done = route(load, ReplicaSetup(5, 9_000, remote_tokens=None, router="round-robin", profile=profile))
    assert [f.remote for f in done.found] == [0, 0, 0, 1_000, 1_000]
    assert done.ttft_ms.tolist() == pytest.approx([1_000, 1_000, 1_000, 100, 100])


def test_the_shared_tier_can_take_a_chunk_only_when_it_is_computed_again() -> None:
    load = RagLoad([request(2.0 * t, n) for t, n in enumerate((1, 1, 1, 2))])
    found = {
        times: route(
            load, ReplicaSetup(4, 0, remote_tokens=None, remote_from=times, router="round-robin", profile=UNIT)
        ).found
        for times in (1, 2)
    }
    assert [(f.remote, f.written) for f in found[1]] == [(0, 1_000), (1_000, 0), (1_000, 0), (0, 1_000)]
    assert [(f.remote, f.written) for f in found[2]] == [(0, 0), (0, 1_000), (1_000, 0), (0, 0)]


def test_a_chunk_is_read_from_the_fastest_tier_that_still_has_it() -> None:
    profile = TokenTimes(token_ms=1.0, load_token_ms=0.01, remote_token_ms=0.1)
    load = RagLoad([request(t, n) for t, n in enumerate((1, 2, 1, 3, 4, 1, 4))])
    done = route(load, ReplicaSetup(1, 1_000, disk_tokens=2_000, remote_tokens=4_000, profile=profile))
    places = ["memory", "disk", "remote", "computed"]
    assert [next(p for p in places if getattr(f, p)) for f in done.found] == [
        "computed", "computed", "disk", "computed", "computed", "remote", "disk",
    ]  # fmt: skip


def test_chunk_aware_divides_the_chunks_among_replicas_where_random_copies_them() -> None:
    asked = [request(float(t), t % 4) for t in range(400)]
    load, shape = RagLoad(asked), ReplicaSetup(4, 1_000, profile=UNIT)  # each holds one of four chunks
    aware, anyone = (
        serve_replicas(load, ReplicaSetup(4, 1_000, profile=UNIT, router=name, routing=RouterSettings(seed=1)))
        for name in ("chunk-aware", "random")
    )
    assert aware.memory > 0.9 > 0.4 > anyone.memory
    assert aware.most_requests < 1.3
    assert load.bounds(shape).belady == pytest.approx(0.99)


def test_a_popular_chunk_does_not_overload_one_replica() -> None:
    load = RagLoad([request(0.01 * t, 7) for t in range(500)])
    slow = TokenTimes(token_ms=0.001, found_token_ms=0.03)  # 30 ms each: four replicas keep up, one does not
    done = serve_replicas(load, ReplicaSetup(4, 9_000, profile=slow))
    assert done.most_requests < 1.4 and done.wait_p95_ms < 60


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(ONLINE),
    router=st.sampled_from(sorted(ROUTERS)),
    seed=st.integers(0, 10_000),
    capacity=st.integers(0, 40),
)
def test_one_replica_computes_the_blocks_of_the_plain_replay_of_conversations(
    policy: str, router: str, seed: int, capacity: int
) -> None:
    trace = Trace.of(random_rows(seed, requests=60), 16)
    shape = ReplicaSetup(1, capacity * 16, policy=policy, router=router, profile=UNIT, xi_blocks=2)
    plain = replay(trace, policy_for(policy, trace, ReplaySetting(capacity, xi_blocks=2)), capacity)
    done = route(TurnLoad(trace), shape)
    assert [found.computed for found in done.found] == [16 * blocks for blocks in plain.uncached]


passages = st.lists(st.integers(0, 12), max_size=4)


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(ONLINE),
    router=st.sampled_from(sorted(ROUTERS)),
    asked=st.lists(passages, min_size=1, max_size=40),
    capacity=st.integers(0, 9_000),
)
def test_one_replica_finds_the_tokens_of_the_plain_replay_of_chunks(
    policy: str, router: str, asked: list[list[int]], capacity: int
) -> None:
    requests = [request(float(t), *numbers, question=7) for t, numbers in enumerate(asked)]
    plain = replay_chunks(position_free(requests), make_any_policy(policy), capacity)
    done = route(RagLoad(requests), ReplicaSetup(1, capacity, policy=policy, router=router, profile=UNIT))
    assert sum(found.memory for found in done.found) == plain.hit_tokens


@settings(max_examples=40, deadline=None)
@given(
    router=st.sampled_from(sorted(ROUTERS)),
    asked=st.lists(st.tuples(passages, st.sampled_from("stu"), st.floats(0, 5)), min_size=1, max_size=40),
    replicas=st.integers(1, 5),
    sizes=st.tuples(st.integers(0, 5_000), st.integers(0, 9_000), st.sampled_from([0, 4_000, None])),
    routers=st.integers(1, 3),
)
def test_replicas_serve_every_request_once_in_order_within_the_offline_bounds(
    router: str,
    asked: list[tuple[list[int], str, float]],
    replicas: int,
    sizes: tuple[int, int, int | None],
    routers: int,
) -> None:
    at, requests = 0.0, []
    for numbers, session, gap in asked:
        at += gap
        requests.append(request(at, *numbers, session=session, question=5))
    load = RagLoad(requests)
    profile = TokenTimes(token_ms=1.0, fixed_ms=1.0, found_token_ms=0.1, load_token_ms=0.05, remote_token_ms=0.2)
    shape = ReplicaSetup(replicas, *sizes, router=router, routers=routers, profile=profile)
    done = route(load, shape)
    seen: set[int] = set()
    free = dict.fromkeys(range(replicas), float("-inf"))
    for number, (asked_for, found) in enumerate(zip(requests, done.found, strict=True)):
        assert sum(found[:4]) == asked_for.tokens and min(found) >= 0
        new = {part.number for part in asked_for.parts if part.kind == "passages_ids"} - seen
        assert found.computed >= 5 + 1_000 * len(new)  # a first read is never found
        seen |= new
        start = asked_for.at * 1000 + done.wait_ms[number]  # one at a time, in order, never idle while a request waits
        replica = done.replica[number]
        assert done.wait_ms[number] >= 0
        assert start == pytest.approx(max(asked_for.at * 1000, free[replica]), abs=1e-6)
        free[replica] = asked_for.at * 1000 + done.ttft_ms[number]
    whole, bounds = serve_replicas(load, shape), load.bounds(shape)
    assert whole.found <= bounds.unbounded + 1e-9
    assert bounds.belady <= bounds.unbounded + 1e-9
    assert 1 <= whole.imbalance <= replicas + 1e-9


def test_replicas_with_an_unbounded_shared_tier_compute_no_chunk_twice() -> None:
    load = RagLoad([request(10.0 * t, t * t % 7, t % 3) for t in range(60)])
    shape = ReplicaSetup(4, 2_000, remote_tokens=None, router="random", profile=UNIT)
    assert serve_replicas(load, shape).found == pytest.approx(load.bounds(shape).unbounded)


def test_the_speedup_for_a_load_makes_replicas_busy_to_that_share() -> None:
    load = RagLoad([request(t, t) for t in poisson(50, 1_000.0)], times=poisson(50, 1_000.0))
    shape = ReplicaSetup(2, 0, router="round-robin", profile=UNIT, speedup=load.speedup_for(0.5, 2, UNIT))
    assert serve_replicas(load, shape).busy == pytest.approx(0.5, rel=0.1)


def test_a_cluster_without_replicas_or_with_an_unusable_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="belady"):
        ReplicaSetup(2, 10, policy="belady")
    with pytest.raises(ConfigError, match="replicas"):
        ReplicaSetup(0, 10)
    with pytest.raises(ConfigError, match="Unknown policy"):
        serve_replicas(RagLoad([request(0, 1)]), ReplicaSetup(1, 10, policy="nonsense"))
